"""The first rows are judged before anything is generated: their own answers must be accepted."""

import asyncio
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.groups.task_settings import JudgeSettings
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.own_answers import FIRST_ROWS, OwnAnswers, sample_of, text_of
from rollq.workers.judging.process_pool import JudgePool
from support.waiting import PATIENCE_S


def as_it_is(prompt: Prompt, sample: Sample) -> float:
    return float(sample.text == prompt.answer)


def in_a_box(prompt: Prompt, sample: Sample) -> float:
    return float(f"\\boxed{{{prompt.answer}}}" in sample.text)


def of_its_own_form(prompt: Prompt, sample: Sample) -> float:
    return float(sample.text == f"FINAL: {prompt.answer}")


def strips(prompt: Prompt, sample: Sample) -> float:
    return float(sample.text == prompt.answer.strip())


def as_a_penalty(prompt: Prompt, sample: Sample) -> float:
    return 0.0 if sample.text == str(prompt.answer) else -1.0


AS_SAMPLE = partial(
    sample_of, prompt_ids=np.array([7], np.int32), encode=lambda text: list(text.encode()), sampling={"max_tokens": 9}
)


def reads_sampling(prompt: Prompt, sample: Sample) -> float:
    """A judge that looks at all that a sample of one turn has."""
    (segment,) = sample.segments
    is_short = sample.response_tokens == len(sample.text.encode()) <= sample.sampling["max_tokens"]
    return float(is_short and segment.prompt_ids.tolist() == [7])


def reads_json(prompt: Prompt, sample: Sample) -> float:
    return float(json.loads(sample.text)["result"] == prompt.answer)


def found(
    judge: str, answers: list[Any], answer_text: str | None = None, *, may_raise: bool = False
) -> tuple[list[str], str]:
    """The problems with the rows, and the doubt."""

    async def look() -> tuple[list[str], str]:
        processes = JudgePool(1)
        name = f"{__name__}.{judge}" if judge in globals() else judge
        made = make_judge(name, {}, JudgeContext(PATIENCE_S, processes))
        try:
            own = OwnAnswers(made, answer_text, may_raise=may_raise)
            return [await own.problem(Prompt("?", answer=answer), AS_SAMPLE) for answer in answers], own.doubt
        finally:
            await processes.close()

    return asyncio.run(look())


@pytest.mark.parametrize(
    ("judge", "answers"),
    [
        ("exact_match", ["a", 5, 2.50, True, ["x", "y"]]),
        ("last_number", ["6*7\n#### 42", 42, "1,234.5"]),
        ("math", [r"\frac{1}{2}", "3", 4]),
        ("as_it_is", ["a", "b"]),
        ("in_a_box", ["a", 5]),
        ("as_a_penalty", ["a", 5]),
        ("of_its_own_form", ["a"]),
        ("reads_sampling", ["a"]),
        ("as_it_is", [None, {"tests": []}, [["in", "out"]]]),
    ],
)
def test_a_judge_that_accepts_its_own_answers_in_a_usual_form_is_fine(judge: str, answers: list[Any]) -> None:
    assert found(judge, answers) == ([""] * len(answers), "")


def test_a_judge_that_raises_on_the_own_answer_names_line_and_text() -> None:
    problems, _ = found("strips", [5])
    assert "AttributeError: 'int' object has no attribute 'strip'" in problems[0]
    assert "test_own_answers.py:" in problems[0]
    assert "it was given the prompt's own answer, as the text '5'" in problems[0]


def test_a_number_that_is_compared_with_a_text_is_doubted() -> None:
    problems, doubt = found("as_it_is", [5] * FIRST_ROWS)
    assert problems == [""] * FIRST_ROWS
    assert "no better reward than a wrong text, such as '5'" in doubt


def test_the_form_that_a_task_names_must_be_accepted() -> None:
    assert found("of_its_own_form", ["a"] * 9, "FINAL: {answer}") == ([""] * 9, "")
    problems, _ = found("of_its_own_form", ["a", "b"], "final: {answer}")
    assert len(list(filter(None, problems))) == 2
    assert "gives 0 to the prompt's own answer, as the text 'final: a'" in problems[0]


def test_a_judge_that_may_raise_is_doubted_and_not_refused() -> None:
    problems, _ = found("reads_json", ["a"])
    assert "set judging.answer_text to the form that it expects" in problems[0]
    problems, doubt = found("reads_json", ["a"] * FIRST_ROWS, may_raise=True)
    assert problems == [""] * FIRST_ROWS
    assert "reads_json" in doubt
    assert found("reads_json", ["a"] * 2, '{"result": "{answer}"}', may_raise=True) == (["", ""], "")


def test_only_the_first_rows_are_looked_at() -> None:
    problems, _ = found("as_it_is", [*["a"] * FIRST_ROWS, 5], "{answer}")
    assert problems == [""] * (FIRST_ROWS + 1)


def test_a_form_without_a_place_for_the_answer_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"must contain \{answer\}"):
        JudgeSettings(answer_text="FINAL")


def test_the_text_of_a_number_has_the_digits_of_the_file() -> None:
    assert text_of(["first", "second"]) == "first"
    assert text_of(True) == "true"
    assert text_of(exact_json.loads(b"147573952589676412928")) == "147573952589676412928"
