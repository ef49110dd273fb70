"""A demo ends by steps: how many, how long they take, and when the model counts as having learned."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollq.cli.demo.command import NothingLearned, check_learned
from rollq.cli.demo.files import DemoFolder
from rollq.cli.demo.length import duration, gain, step_seconds, steps_within
from rollq.cli.demo.models import TINY
from rollq.cli.demo.settings import WARM_UP_STEPS, DemoOptions

OPTIONS = DemoOptions(
    out=Path("demo"),
    model=TINY,
    steps=TINY.steps,
    minutes=None,
    seed=1,
    prompts=None,
    prompt_field="prompt",
    answer_field="answer",
    max_staleness=1,
    strategy="async",
    partial_rollout=False,
    warm_up_steps=WARM_UP_STEPS,
    workers=2,
    live=False,
)


@pytest.mark.parametrize(("seconds", "steps"), [(-10, 40), (0, 40), (100, 50), (299, 149), (1e6, 150)])
def test_a_wished_time_never_leaves_less_than_what_shows_learning(seconds: float, steps: int) -> None:
    assert steps_within(seconds, 2.0, least=40, most=150) == steps


def test_a_step_takes_as_long_as_an_evaluation_of_as_many_samples_makes_likely() -> None:
    assert step_seconds(8.0, 512, 256) == pytest.approx(step_seconds(4.0, 512, 512))
    assert (duration(61), duration(200)) == ("about 61 s", "about 3 minutes")


def test_the_gain_is_that_of_the_mean_over_tasks() -> None:
    held_out = {"before": {"sum": 0.2, "sort": 0.4}, "after": {"sum": 0.5, "sort": 0.5}}
    assert gain(held_out) == pytest.approx(0.2)


def test_a_run_whose_model_answers_as_before_fails_and_says_where_to_look(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path)
    with pytest.raises(NothingLearned, match=r"changed by \+0\.010.*logs, or try a different --seed"):
        check_learned({"before": {"sum": 0.30}, "after": {"sum": 0.31}}, folder)
    check_learned({"before": {"sum": 0.30}, "after": {"sum": 0.50}}, folder)


def test_only_a_run_that_can_learn_must() -> None:
    assert OPTIONS.should_learn
    assert replace(OPTIONS, steps=TINY.least_steps).should_learn
    assert not replace(OPTIONS, steps=TINY.least_steps - 1).should_learn
    assert not replace(OPTIONS, warm_up_steps=1).should_learn
    assert not replace(OPTIONS, prompts=Path("questions.jsonl")).should_learn
