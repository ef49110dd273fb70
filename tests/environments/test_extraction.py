"""The part of a text that a grader gets: right answers stay right."""

import re

import pytest

from rollq.environments.reasoning_gym.extraction import extracted
from rollq.environments.tags import last_tagged


@pytest.mark.parametrize(
    "answer", ["1e5", "0110", "12.50", "-7", "3/4", "1,234", "$\\frac{3}{4}$", "1 0\n0 1", "02:45", "50%", "ab\n\ncd"]
)
def test_a_right_answer_on_last_lines_stays_as_it_is(answer: str) -> None:
    assert extracted(f"First I thought it was 99.\n{answer}", answer) == answer


@pytest.mark.parametrize(
    ("text", "expected"), [("It is 1,234.", "1234"), ("= 1e3", "1000"), ("1234 or\n-5 apples", "-5"), ("none", "")]
)
def test_of_a_number_only_the_number_is_taken(text: str, expected: str) -> None:
    assert extracted(text, "1234") == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "<answer>3", "3</answer>", "</answer>3<answer>", "<answer> 3 </answer>", "<Answer>3</ANSWER> or 4",
        "<answer>1</answer><answer>2</answer>", "<answer>1<answer>2</answer>", "<answer>1</answer></answer>",
        "<answer>1</answer><answer>2", "<answer></answer>", "<answer>\n1\n2\n</answer>", "İ<answer>ß</answer>",
    ],
)  # fmt: skip
def test_the_last_text_between_tags_is_the_answer(text: str) -> None:
    found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    assert last_tagged(text) == (found[-1].strip() if found else None)


def test_a_million_tags_without_an_end_are_read_at_once() -> None:
    """A search for the end from each tag would take hours."""
    assert last_tagged("<answer>" * 1_000_000) is None
