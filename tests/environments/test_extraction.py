"""The part of a text that a grader gets: right answers stay right."""

import pytest

from rollq.environments.reasoning_gym.extraction import extracted


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
