"""Groups that are judged as a whole, on their way through real workers."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.credit import TOKEN_REWARDS
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from rollq.producer.batches import OverRollout
from rollq.producer.coordinator import BatchCoordinator
from rollq.workers import Credit
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.groups.group_judging import after, before, kept_until_judged, too_few, waiting
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.group_judge import make_group_judge
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from rollq.workers.judging.token_rewards import token_rewards_of, with_token_rewards
from rollq.workers.run import Worker
from support.buffer_run import make_sample
from support.slow_engine import pass_time
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld

from .test_fleet import play
from .test_lending import taken

ASKED: list[list[tuple[str, float | None]]] = []
"""Text and reward of the samples in each call of a group judge."""
HELD = {"judge": False}
ENDED: list[int] = []


@pytest.fixture(autouse=True)
def forgotten() -> None:
    ASKED.clear()
    ENDED.clear()
    HELD["judge"] = False


class Numbered:
    """Each sample's text is its index. `broken` ones fail, `empty` ones are None, `pending` ones are as before; with
    `backwards` of n samples, the last one ends first."""

    resumable = True

    def __init__(
        self,
        broken: Sequence[int] = (),
        backwards: int = 0,
        empty: Sequence[int] = (),
        pending: Sequence[int] = (),
    ) -> None:
        self._broken = broken
        self._pending = pending
        self._empty = empty
        self._backwards = backwards

    async def run(self, rollout: Rollout) -> Sample:
        index = int(rollout.session.split("/")[2])
        sample = await SingleTurn().run(rollout)
        while self._backwards and len(ENDED) < self._backwards - 1 - index:
            await asyncio.sleep(0.005)
        ENDED.append(index)
        if index in self._broken:
            raise RuntimeError("this one is broken")
        if index in self._empty:
            return None  # type: ignore[return-value]
        if index in self._pending:
            return rollout.previous
        return replace(sample, text=str(index)) if sample.status is SampleStatus.COMPLETED else sample


def note(samples: Sequence[Sample]) -> None:
    ASKED.append([(sample.text, sample.reward) for sample in samples])


def rank(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    note(samples)
    return [10.0 + int(sample.text) for sample in samples]


def on_top(prompt: Prompt, samples: Sequence[Sample]) -> list[dict[str, float]]:
    note(samples)
    return [{"alone": sample.reward or 0.0, "place": float(sample.text)} for sample in samples]


def mixed(prompt: Prompt, samples: Sequence[Sample]) -> list[Any]:
    """Every kind of entry."""
    numbers = np.arange(float(samples[3].response_tokens))
    return [None, {"score": 0.5, "right": True, "why": "short"}, 2, Credit(tokens=numbers)]


async def held(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    note(samples)
    while HELD["judge"]:
        await asyncio.sleep(0.005)
    return [float(sample.text) for sample in samples]


def leaving() -> Iterator[float]:
    yield 1.0
    raise SystemExit(5)


def hanging() -> Iterator[float]:
    time.sleep(60)
    yield 1.0


def bad(prompt: Prompt, samples: Sequence[Sample]) -> Any:
    """What goes wrong is the prompt's answer."""
    kinds: Mapping[str, Any] = {
        "short": [1.0] * (len(samples) - 1),
        "nan": [1.0, float("nan"), 1.0, 1.0],
        "bool": [1.0, 1.0, 1.0, True],
        "huge": [1.0, 1e39, 1.0, 1.0],
        "none": None,
        "text": "1234",
        "wrong credit": [1.0, 1.0, 1.0, Credit(tokens=[1.0])],
        "leaves": leaving(),
        "credit that leaves": [1.0, 1.0, 1.0, Credit(tokens=leaving())],
        "hangs in its list": hanging(),
    }
    if prompt.answer == "raises":
        raise RuntimeError("the ranking is out")
    if prompt.answer == "no sandbox":
        raise SampleFailed(FailureKind.SANDBOX, "no machine is free")
    if prompt.answer == "hangs":
        time.sleep(60)
    return kinds[prompt.answer]


def asks(function: str, **rules: Any) -> dict[str, Any]:
    """A task of groups of four that this module's function judges."""
    return {"group_size": 4, "group_judge": f"{__name__}.{function}", "agent_loop": f"{__name__}.Numbered", **rules}


def ended(world: WorkerWorld, status: Status, **settings: Any) -> Script:
    """Play until the only group has this status."""
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(status, 1)

    return world.play(scene, **settings)


def only_group(world: WorkerWorld) -> Sequence[Sample]:
    ((_, samples),) = world.results(1)
    return samples


@pytest.mark.parametrize("isolate", [False, True])
def test_a_group_is_judged_once_by_its_finished_samples_in_their_order(
    buffer: Buffer, server_url: str, isolate: bool
) -> None:
    options = {"broken": [1], "backwards": 4}
    rules = asks("rank", agent_options=options, min_valid_samples=3, isolate_judge=isolate)
    world = WorkerWorld(buffer, server_url, rules)
    ended(world, Status.COMPLETED)
    samples = only_group(world)
    assert ENDED == [3, 2, 1, 0]
    assert [sample.reward for sample in samples] == [10.0, None, 12.0, 13.0]
    assert [sample.text for sample in samples] == ["0", "", "2", "3"]
    assert samples[1].error is not None
    assert "this one is broken" in samples[1].error
    assert samples[0].extra["judge"] == "rank"
    assert ([] if isolate else [[("0", None), ("2", None), ("3", None)]]) == ASKED  # another process has its own list
    world.world.check()


def leaks(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    return [float(len(Path(__file__).read_bytes())) for _ in samples]


def test_a_sealed_group_judge_reads_no_files(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, asks("leaks", isolate_judge="sealed"))
    ended(world, Status.FAILED)
    assert "PermissionError" in world.error(1)


@pytest.mark.parametrize("isolate", [False, True])
def test_an_entry_is_anything_that_a_judge_may_return_or_none_which_fails_its_sample(
    buffer: Buffer, server_url: str, isolate: bool
) -> None:
    world = WorkerWorld(buffer, server_url, asks("mixed", min_valid_samples=3, isolate_judge=isolate))
    ended(world, Status.COMPLETED)
    none, parts, number, credit = only_group(world)
    assert (none.status, none.failure, none.reward) == (SampleStatus.FAILED, FailureKind.GRADER, None)
    assert none.error == f"group judge '{__name__}.mixed': returned None for this sample"
    assert (parts.reward, parts.reward_parts, parts.extra["why"]) == (0.5, {"score": 0.5, "right": 1.0}, "short")
    assert (number.reward, number.reward_parts) == (2.0, {})
    (segment,) = credit.segments
    assert list(segment.arrays[TOKEN_REWARDS]) == [0, 1, 2]  # type: ignore[arg-type]
    assert credit.reward == 3.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "RuntimeError: the ranking is out"),
        ("no sandbox", "bad': no machine is free"),
        ("hangs", "took longer than 1 s"),
        ("short", "returned 3 entries for 4 samples; expected one for each"),
        ("nan", "returned nan; expected a finite number"),
        ("bool", "returned True; expected a number, or a mapping of names to numbers"),
        ("huge", "returned 1e+39; expected a finite number of 32 bits"),
        ("none", "returned None; expected a list with an entry for each sample"),
        ("text", "returned '1234'; expected a list with an entry for each sample"),
        ("wrong credit", "returned Credit with 1 tokens for a sample of 3 tokens"),
        ("leaves", "SystemExit"),
        ("credit that leaves", "SystemExit"),
        ("hangs in its list", "took longer than 1 s"),
    ],
)
@pytest.mark.parametrize("isolate", [False, True])
def test_a_group_whose_judge_fails_fails_with_the_reason_and_without_rewards(
    buffer: Buffer, server_url: str, kind: str, said: str, isolate: bool
) -> None:
    world = WorkerWorld(buffer, server_url, asks("bad", isolate_judge=isolate, judge="exact_match"))
    clock = buffer.clock("math")
    buffer.admit("math", [(Prompt("?", answer=kind), 1)], epoch=clock.epoch, cursor=0, target=10, step=clock.step)
    world.tickets(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 1)
        await world.until(lambda: any(report["unrewarded"] for report in buffer.workers().values()))
        (report,) = buffer.workers().values()
        assert report["judge_error"] == world.error(1)

    world.play(scene, judge_timeout_s=1 if kind.startswith("hangs") else PATIENCE_S)
    assert world.error(1).startswith(f"group judge '{__name__}.bad': ")
    assert said in world.error(1)
    facts = buffer.inspect("math", 1)
    assert (facts["letters"], float(facts["reward"])) == ("ffff", 0.0)
    assert buffer.counts("math").failed_samples == {"sandbox" if kind == "no sandbox" else "grader": 4}
    assert buffer.counts("math").progress.get("reward_count", 0) == 0
    world.world.check()


def test_a_group_judge_sees_the_rewards_of_the_judge_and_comes_before_penalty_and_filters(
    buffer: Buffer, server_url: str
) -> None:
    rules = asks(
        "on_top", judge="support.worker_run.cold_judge", filters=["zero_advantage"], max_tokens=4,
        overlong_buffer_tokens=4, overlong_penalty=2.0,
    )  # fmt: skip
    world = WorkerWorld(buffer, server_url, rules)
    ended(world, Status.COMPLETED)
    assert ASKED == [[("0", 0.0), ("1", 0.0), ("2", 0.0), ("3", 0.0)]]
    samples = only_group(world)
    assert [sample.reward for sample in samples] == [-1.5, -0.5, 0.5, 1.5]
    assert samples[3].reward_parts == {"alone": 0.0, "place": 3.0, "overlong": -1.5}
    assert samples[3].extra["judge"] == "cold_judge, on_top"
    assert samples[3].extra["judged_reward"] == 3.0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("broken", "this one is broken"),
        ("empty", "TypeError: returned None; expected a Sample"),
        ("pending", "ValueError: returned a pending sample; expected a completed, failed or aborted one"),
    ],
)
def test_a_group_with_too_few_samples_fails_with_their_error_and_is_not_judged(
    buffer: Buffer, server_url: str, fault: str, said: str
) -> None:
    world = WorkerWorld(buffer, server_url, asks("rank", agent_options={fault: [2]}))
    ended(world, Status.FAILED)
    assert said in world.error(1)
    assert buffer.inspect("math", 1)["letters"] == "ffff"
    assert ASKED == []


@pytest.mark.parametrize("judge", ["none", "support.worker_run.cold_judge"])
def test_the_worker_that_holds_the_lease_judges_what_others_have_made(
    buffer: Buffer, server_url: str, judge: str
) -> None:
    rules = asks("rank", judge=judge, group_size=8, max_tokens=2000, partial_rollout=True)
    world = WorkerWorld(buffer, server_url, rules)

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [4, 4])
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        assert world.buffer.counts("math").progress["lent"] == 4

    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    samples = only_group(world)
    assert [sample.reward for sample in samples] == [10.0 + index for index in range(8)]
    assert [sample.text for sample in samples] == list("01234567")
    assert len({sample.extra["worker"] for sample in samples}) == 2
    assert [[text for text, _ in call] for call in ASKED] == [list("01234567")]
    assert not any("awaits_group" in sample.extra for sample in samples)
    world.world.check()


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("judge", ["none", "support.worker_run.cold_judge"])
def test_a_group_that_is_stopped_while_it_is_judged_is_judged_again_and_not_made_again(
    buffer: Buffer, server_url: str, judge: str, partial_rollout: bool
) -> None:
    world = WorkerWorld(buffer, server_url, asks("held", judge=judge, partial_rollout=partial_rollout))
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: len(ASKED) == 1)
        buffer.set_control("math", Control.PAUSE)
        await world.until_count(Status.ABORTED, 1)
        HELD["judge"] = False
        buffer.set_control("math", Control.RUN)
        world.recycle(1)
        world.tickets(1)
        await world.until_count(Status.COMPLETED, 1)

    HELD["judge"] = True
    script = world.play(scene, pause="abort")
    assert len(script.requests) == 4
    samples = only_group(world)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0, 3.0]
    assert {sample.extra["judge"] for sample in samples} == {"held" if judge == "none" else "cold_judge, held"}
    assert not any("awaits_group" in sample.extra for sample in samples)
    assert ASKED[0] == ASKED[-1] == [(text, None if judge == "none" else 0.0) for text in "0123"]
    world.world.check()


@pytest.mark.parametrize("judge", ["none", "support.worker_run.cold_judge"])
def test_the_group_of_a_worker_that_counts_as_dead_is_judged_once_more_and_its_own_result_refused(
    buffer: Buffer, server_url: str, judge: str
) -> None:
    rules = asks("held", judge=judge, max_tokens=2000, partial_rollout=True, spread="never")
    world = WorkerWorld(buffer, server_url, rules)
    scripts: list[Script] = []

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        scripts.append(script)
        script.gate.set()
        world.admit(1)
        await world.until(lambda: len(ASKED) == 1)
        await world.until(lambda: int(buffer.inspect("math", 1).get("parts", 0)) >= 4)
        world.world.run_out_ids("math", [1])
        assert buffer.reap("math").requeued == 1
        world.tickets(1)
        await world.until(lambda: len(ASKED) == 2)
        HELD["judge"] = False
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: sum(worker.runner.totals.refused for worker in workers) == 1)

    HELD["judge"] = True
    play(world, scene, {}, {})
    assert ASKED[0] == ASKED[1]
    assert len(scripts[0].requests) == 4, "nothing was made again"
    assert [sample.reward for sample in only_group(world)] == [0.0, 1.0, 2.0, 3.0]
    world.world.check()


def test_a_group_that_ends_with_its_batch_is_judged_by_what_it_has(buffer: Buffer, server_url: str) -> None:
    rules = asks("rank", group_size=3, min_valid_samples=2, partial_rollout=True)
    world = WorkerWorld(buffer, server_url, rules)
    cut = OverRollout(ratio=0.9, grace_s=0.0, partial_groups=True)
    coordinator = BatchCoordinator(buffer, world.queue, over_rollout=cut)
    prompts = [Prompt("one", answer="1"), Prompt("two", answer="2")]

    async def scene(worker: Worker, script: Script) -> None:
        batch = coordinator.submit("math", "1", prompts, step=1)
        await world.until(lambda: script.running == 6)
        pass_time(10)
        await world.until(lambda: script.running == 1 and world.count(Status.GATHERED) == 1)
        result = await asyncio.to_thread(coordinator.finalize, "math", batch, timeout_s=PATIENCE_S)
        assert result.finished_task_count == 2

    world.play(scene, engine="support.slow_engine.SlowEngine", lengths=[4, 4, 4, 4, 4, 10_000])
    assert sorted(map(len, ASKED)) == [2, 3]
    for _, samples in world.results(2):
        for index, sample in enumerate(samples):
            assert sample.reward == (10.0 + index if sample.status is SampleStatus.COMPLETED else None)
    world.world.check()


@pytest.mark.parametrize("entry", [2.0, {"a": 1.5, "b": 0.5}, Credit(tokens=[1.0, 0.0, 1.0]), Credit(2, turns=[2.0])])
@pytest.mark.parametrize("tokens", [None, [0.5, 0.0, 1.0]])
def test_a_sample_whose_siblings_are_made_again_gets_the_rewards_back_that_it_had(entry: Any, tokens: Any) -> None:
    alone = make_sample(0)
    if tokens is not None:
        alone = with_token_rewards(alone, np.array(tokens, np.float32))
    judge = make_group_judge(f"{__name__}.rank", JudgeContext(60, JudgePool(1)))
    verdict = judge._verdict(entry, alone)
    judged = after(alone, verdict, judge, 0.1)
    assert judged.reward == 2.0
    again = before(judged)
    assert (again.reward, again.reward_parts, again.extra) == (alone.reward, alone.reward_parts, alone.extra)
    assert shown(again) == shown(alone) == tokens
    if tokens is not None and not isinstance(entry, Credit):
        assert shown(judged) == [0.5, 0.0, 1.0 + 2.0 - (alone.reward or 0.0)]
    assert before(again) is again


def shown(sample: Sample) -> list[float] | None:
    rewards = token_rewards_of(sample)
    return None if rewards is None else rewards.tolist()


def test_notes_of_a_verdict_go_with_it() -> None:
    judge = make_group_judge(f"{__name__}.rank", JudgeContext(60, JudgePool(1)))
    judged = after(make_sample(0), Verdict(1.0, notes={"why": "short"}), judge, 0.1)
    assert judged.extra["why"] == "short"
    assert "why" not in before(judged).extra


def test_what_the_buffer_keeps_of_a_group_before_it_is_judged_is_unfinished() -> None:
    made, failed, cut = (make_sample(0, status=letter) for letter in "cfa")
    assert [sample.status for sample in kept_until_judged([made, failed])] == ["a", "f"]
    assert [sample.status for sample in kept_until_judged([made, failed, cut])] == ["c", "f", "a"]
    unjudged = replace(made, reward=None)
    assert [sample.status for sample in kept_until_judged([unjudged, cut])] == ["a", "a"]
    assert waiting(made).awaits_judge


def test_samples_that_are_not_judged_fail_at_the_part_that_most_others_failed_at() -> None:
    done = Sample((), SampleStatus.COMPLETED)
    lost = [
        Sample((), SampleStatus.FAILED, error=kind.value, failure=kind)
        for kind in (FailureKind.GRADER, FailureKind.PROVIDER, FailureKind.PROVIDER)
    ]
    assert [sample.failure for sample in too_few([done, *lost])] == [
        FailureKind.PROVIDER, FailureKind.GRADER, FailureKind.PROVIDER, FailureKind.PROVIDER,
    ]  # fmt: skip


def test_a_judge_that_gives_no_reward_needs_a_group_judge() -> None:
    given = {"batch_groups": 1, "group_size": 4}
    assert WorkerTask.model_validate({**given, "group_judge": "a.b"}).judge == "none"
    assert WorkerTask.model_validate({**given, "group_judge": "a.b", "judge": "math"}).judge == "math"
    with pytest.raises(ValueError, match=r'judge = "none" gives no reward; set judging\.group_judge'):
        WorkerTask.model_validate({**given, "judge": "none"})
    with pytest.raises(ConfigError, match="'none' gives no reward; name another judge"):
        make_judge("weighted", {"parts": {"a": {"judge": "none"}}}, JudgeContext(60, JudgePool(1)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rank", "group judge 'rank': use a dotted path"),
        (f"{__name__}.no_such", "has no 'no_such'"),
        (f"{__name__}.shown", "has the wrong parameters .*; expected def or async def rank"),
        (f"{__name__}.asking", "takes pools, but none is set"),
    ],
)
def test_a_group_judge_that_cannot_be_called_is_a_configuration_error(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_group_judge(name, JudgeContext(60, JudgePool(1)))


async def asking(prompt: Prompt, samples: Sequence[Sample], pools: Mapping[str, Any]) -> list[float]:
    raise NotImplementedError
