"""Filters of finished groups: which groups are dropped, what is counted before, and how a filter fails."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from rollq.workers.groups.filters import Filter, FilterError, is_finished, keep, zero_advantage
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.run import Worker
from rollq.workers.settings import WorkerSettings
from support.buffer_run import make_sample
from support.worker_run import Script, WorkerWorld

PROMPT = Prompt("?")


def group(*rewards: float | None) -> tuple[Sample, ...]:
    """One sample per reward; None: a failed one."""
    return tuple(make_sample(0, reward=reward, status="c" if reward is not None else "f") for reward in rewards)


def never(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    return False


async def no_even_number(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    return int(prompt.answer) % 2 == 1


def broken(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    raise LookupError("no such column")


def undecided(prompt: Prompt, samples: Sequence[Sample]) -> Any:
    return None


class Unspeakable:
    def __repr__(self) -> str:
        raise SystemExit(7)


def unspeakable(prompt: Prompt, samples: Sequence[Sample]) -> Any:
    return Unspeakable()


async def endless(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    await asyncio.Event().wait()
    return True


def coin(prompt: Prompt, sample: Sample) -> float:
    """Rewards of one group differ: by the seed."""
    return float(hash(str(sample.sampling["seed"])) % 1000)


def failing_once(prompt: Prompt, sample: Sample) -> float:
    """Fails the first sample that comes."""
    if not _judged and sample.sampling["seed"]:  # 0: an own answer, before anything is made
        _judged.append(sample)
        raise RuntimeError("no verdict")
    return 0.5


_judged: list[Sample] = []


@pytest.mark.parametrize(
    ("samples", "kept"),
    [
        (group(1.0, 0.0), True),
        (group(1.0, 1.0), False),
        (group(0.0, 0.0, 0.0), False),
        (group(0.3, 0.1 + 0.2), False),  # the same but for rounding
        (group(0.3, 0.30001), True),
        (group(1e-6, 0.0), False),  # no more than the least difference that counts
        (group(1.0, None), False),  # what failed has no reward
        (group(1.0, None, 0.0), True),
        (group(None, None), False),
        (group(-1.0, 1.0), True),
        *(
            ((*group(1.0, 1.0), replace(make_sample(0, reward=0.0), status=SampleStatus(letter))), False)
            for letter in "fap"
        ),
    ],
)
def test_groups_with_the_same_reward_everywhere_have_no_advantage(samples: Sequence[Sample], kept: bool) -> None:
    assert zero_advantage(PROMPT, samples) is kept


@pytest.mark.parametrize(
    ("letters", "min_valid", "finished"),
    [
        ("cc", 2, True),
        ("cc", 1, True),
        ("cf", 2, False),
        ("cf", 1, True),
        ("ca", 1, False),
        ("cp", 1, False),
        ("ff", 1, False),
    ],
)
def test_xp06_filters_see_groups_that_would_be_completed(letters: str, min_valid: int, finished: bool) -> None:
    assert is_finished([make_sample(0, status=letter) for letter in letters], min_valid) is finished


def test_the_first_filter_that_refuses_ends_the_row() -> None:
    refusing, failing = (Filter.load(f"{__name__}.{name}", 5) for name in ("never", "broken"))
    assert asyncio.run(keep([refusing, failing], PROMPT, group(1.0))) is False
    assert asyncio.run(keep([], PROMPT, group(1.0))) is True


@pytest.mark.parametrize(
    ("name", "timeout_s", "words"),
    [
        ("broken", 30, f"filter '{__name__}.broken': LookupError: no such column"),
        ("undecided", 30, f"filter '{__name__}.undecided': returned None; expected True (keep) or False"),
        ("unspeakable", 30, f"filter '{__name__}.unspeakable': RuntimeError: SystemExit(7)"),
        ("endless", 0.05, f"filter '{__name__}.endless': took longer than 0.05 s"),
    ],
)
def test_a_filter_that_fails_says_which_it_is(name: str, timeout_s: float, words: str) -> None:
    with pytest.raises(FilterError) as caught:
        asyncio.run(Filter.load(f"{__name__}.{name}", timeout_s).keeps(PROMPT, group(1.0)))
    assert str(caught.value).partition(" (tests")[0] == words


def one_sample(sample: Sample) -> bool:
    return True


def test_a_filter_that_cannot_be_called_with_prompt_and_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf'filters = "{__name__}.one_sample": def one_sample\(sample\) has the w'):
        Filter.load(f"{__name__}.one_sample", 1.0)


def test_a_filter_that_does_not_exist_is_refused_at_the_start() -> None:
    task = WorkerTask(batch_groups=1, filters=("no_such",))
    with pytest.raises(ConfigError, match="filter 'no_such': use zero_advantage, or a dotted path"):
        make_recipes({"math": task}, WorkerSettings(), 0, JudgePool(1))


def test_groups_of_one_sample_have_no_advantage_to_filter_by() -> None:
    with pytest.raises(ValidationError, match="raise group_size or leave the filter out"):
        WorkerTask(batch_groups=1, group_size=1, filters=("zero_advantage",))


def test_xp06_rewards_and_tokens_are_counted_before_a_filter_drops_the_group(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"filters": ["zero_advantage", f"{__name__}.never"]})
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FILTERED, 2)

    world.play(scene, answer="1")
    progress = buffer.counts("math").progress
    assert (progress["reward_sum"], progress["reward_count"], progress["filtered"]) == (2.0, 4, 2)
    assert progress["tokens"] == 8
    world.world.check()


def test_xp06_a_filter_that_may_wait_decides_group_by_group(buffer: Buffer, server_url: str) -> None:
    rules = {"filters": ["zero_advantage", f"{__name__}.no_even_number"], "judge": f"{__name__}.coin"}
    world = WorkerWorld(buffer, server_url, rules)
    world.admit(4)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: world.count(Status.FILTERED) + world.count(Status.COMPLETED) == 4)

    world.play(scene)
    assert [group_id for group_id, _ in world.results(2)] == [2, 4]  # the answers of 1 to 4 are 0 to 3
    world.world.check()


def test_xp06_a_missing_score_is_a_warning_and_left_out_of_the_sums(
    buffer: Buffer, server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """XTuner keeps a sample whose judge gave no score. Here it failed, and the group is trained without it."""
    world = WorkerWorld(buffer, server_url, {"judge": f"{__name__}.failing_once", "min_valid_samples": 1})
    _judged.clear()
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene)
    progress = buffer.counts("math").progress
    assert (progress["reward_sum"], progress["reward_count"]) == (0.5, 1)
    assert "1 of 2 samples have no reward; sums leave them out" in caplog.text


def test_xp08_filtered_and_failed_groups_are_counted_per_task_and_hold_nothing(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"filters": ["zero_advantage"]})
    other = world.task.model_copy(update={"filters": (f"{__name__}.broken",)})
    world.tasks["code"] = other
    buffer.register_task("code", other)
    world.admit(3)
    assert world.world.admit(2, "code") == 2
    world.tickets(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FILTERED, 3)
        await world.until(lambda: buffer.counts("code").statuses[Status.FAILED] == 2)
        await world.until(lambda: worker.table.idle)

    world.play(scene)
    math, code = buffer.counts("math"), buffer.counts("code")
    assert (math.progress["filtered"], math.progress.get("failed", 0)) == (3, 0)
    assert (code.progress.get("filtered", 0), code.progress["failed"]) == (0, 2)
    assert math.statuses[Status.RUNNING] == code.statuses[Status.RUNNING] == 0
    world.world.check()


def test_xp14_an_exception_in_a_filter_ends_that_group_only_with_its_words_kept(
    buffer: Buffer, server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = WorkerWorld(buffer, server_url, {"filters": [f"{__name__}.broken"]})
    other = world.task.model_copy(update={"filters": ()})
    world.tasks["code"] = other
    buffer.register_task("code", other)
    world.admit(1)
    assert world.world.admit(1, "code") == 1
    world.tickets(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 1)
        await world.until(lambda: buffer.counts("code").statuses[Status.COMPLETED] == 1)

    with caplog.at_level(logging.ERROR):
        world.play(scene)
    error = world.error(1)
    assert error.startswith(
        f"filter '{__name__}.broken': LookupError: no such column (tests/workers/groups/test_filters"
    )
    assert error.endswith(" in broken)")
    assert "Traceback" in caplog.text
    world.world.check()
