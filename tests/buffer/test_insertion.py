"""Finished groups that no worker has made: inserted once, never too old, and kept by everything that keeps groups."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.reader import Archive
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.put_args import MAX_CALL_BYTES
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ConfigError, InvalidGroup, ServerRefused
from rollq.buffer.rules.settings import PayloadSettings, TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import FinishedGroup, GroupResult, Prompt, SampleStatus, VersionSpan, unversioned
from support.any_server import AnyServer
from support.buffer_run import World, make_sample
from support.finished_groups import finished_group, finished_groups, finished_sample

OFFLINE: dict[str, object] = {"offline": True}


def started(world: World, math: dict[str, object] | None = None) -> World:
    return world.start(demos=OFFLINE) if math is None else world.start(demos=OFFLINE, math=math)


@pytest.mark.any_server
def test_inserted_groups_are_completed_and_counted_and_trained(world: World) -> None:
    started(world)
    assert world.buffer.insert("demos", finished_groups(3), source="expert") == 3
    assert world.statuses("demos") == {"completed": 3}
    progress = world.buffer.counts("demos").progress
    assert (progress["admitted"], progress["inserted"]) == (3, 3)
    world.check()
    (first, second) = world.buffer.fetch(world.train(1, demos=2).groups)
    assert [group.prompt.content for group in (first, second)] == ["prompt 0", "prompt 1"]
    assert [sample.reward for sample in first.samples] == [0.0, 1.0]
    assert first.samples[0].is_inserted
    assert (first.samples[0].oldest_version, first.samples[0].newest_version) == (None, None)
    assert np.isnan(first.samples[0].segments[0].logprobs).all()
    world.buffer.checkpoint(world.held, 1)
    assert world.buffer.counts("demos").dropped == {"trained": 2}
    world.check()


@pytest.mark.any_server
def test_an_insertion_that_is_repeated_or_resumed_inserts_nothing_twice(world: World) -> None:
    started(world)
    groups = finished_groups(7)
    assert world.buffer.insert("demos", groups[:3], source="expert") == 3
    assert world.buffer.insert("demos", groups[:3], source="expert") == 0
    assert world.buffer.insert("demos", groups[:5], source="expert") == 2
    assert world.buffer.insert("demos", groups[4:], source="expert", after=4) == 2
    assert world.buffer.inserted("demos", "expert") == 7
    assert world.buffer.insert("demos", groups[:1], source="another") == 1
    assert world.buffer.inserted("demos", "another") == 1
    assert world.statuses("demos") == {"completed": 8}
    claimed = world.claim(1, demos=8)
    prompts = [group.prompt.content for group in world.buffer.fetch(claimed.groups)]
    assert prompts == [f"prompt {number}" for number in range(7)] + ["prompt 0"]
    with pytest.raises(ConfigError, match="after = 9: only 7 groups of source 'expert'"):
        world.buffer.insert("demos", groups, source="expert", after=9)
    world.check()


def test_insertions_of_one_source_at_a_time_insert_each_group_once(world: World) -> None:
    started(world)
    groups = [
        FinishedGroup(Prompt(f"prompt {number}"), (finished_sample(text="x" * (MAX_CALL_BYTES // 4)),) * 2)
        for number in range(20)
    ]
    added: list[int] = []

    def insert() -> None:
        added.append(world.buffer.insert("demos", groups, source="expert"))

    threads = [threading.Thread(target=insert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 3
    claimed = world.claim(1, demos=20)
    found = world.buffer.fetch(claimed.groups)
    assert [group.prompt.content for group in found] == [f"prompt {number}" for number in range(20)]
    world.check()


@pytest.mark.any_server
def test_inserted_groups_never_become_too_old(world: World) -> None:
    started(world, math={"max_staleness": 0})
    world.buffer.insert("demos", finished_groups(2), source="expert")
    world.complete(2)
    for step in range(1, 4):
        world.buffer.publish(world.held, step, uri=f"u{step}", digest=str(step))
        world.claim(step, math=0, demos=0)
        world.buffer.commit(world.held, step)
    for task in ("math", "demos"):
        world.buffer.expire(task)
    assert world.statuses("demos") == {"completed": 2}
    assert world.statuses("math") == {"expired": 2}
    assert len(world.claim(4, demos=2).groups) == 2


@pytest.mark.parametrize("mode", ["replay", "return", "regenerate"])
@pytest.mark.any_server
def test_a_trainer_that_resumes_gets_inserted_groups_back(world: World, mode: str) -> None:
    started(world)
    world.buffer.insert("demos", finished_groups(4), source="expert")
    first = [group.group_id for group in world.train(1, demos=2).groups]
    world.train(2, demos=2)
    world.begin(0, mode=mode, launch_id="second")
    assert "pending" not in world.statuses("demos")
    assert [group.group_id for group in world.train(1, demos=2).groups] == first
    assert world.buffer.inserted("demos", "expert") == 4
    world.check()


@pytest.mark.any_server
def test_released_and_reused_groups_stay_inserted_ones(world: World) -> None:
    world.start(demos={**OFFLINE, "max_uses": 2})
    world.buffer.insert("demos", finished_groups(2), source="expert")
    claimed = world.claim(1, demos=2)
    world.buffer.release(world.held, 1, "return", claim_round=claimed.claim_round)
    world.train(1, demos=2)
    assert world.statuses("demos") == {"archived": 2, "completed": 2}
    assert len(world.train(2, demos=2).groups) == 2
    assert world.buffer.counts("demos").progress["inserted"] == 2
    world.check()


def test_a_snapshot_has_inserted_groups_and_how_many_of_each_source(
    world: World, fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    started(world)
    world.buffer.insert("demos", finished_groups(3), source="expert")
    world.train(1, demos=1)
    world.buffer.save(tmp_path / "saved")
    world.buffer.insert("demos", finished_groups(5), source="expert")
    payloads = PayloadSettings(url=str(tmp_path / "payloads"))
    with Buffer.connect(fresh_server.url, world.buffer.run, payloads=payloads) as buffer:
        buffer.restore(tmp_path / "saved")
        restored = World(buffer)
        restored.begin(0, launch_id="second", mode="return")
        assert buffer.inserted("demos", "expert") == 3
        assert buffer.insert("demos", finished_groups(5), source="expert") == 2
        found = buffer.fetch(restored.claim(1, demos=5).groups)
        assert sorted(str(group.prompt.content) for group in found) == [f"prompt {number}" for number in range(5)]
        restored.check()


def test_an_inserted_group_comes_back_from_the_archive_as_it_was(world: World, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    world.start(demos={**OFFLINE, "archive": True})
    groups = [finished_group(0), finished_group(1, logprobs=[-0.5, -0.25, -1.0])]
    world.buffer.insert("demos", groups, source="expert")
    trained = world.buffer.fetch(world.train(1, demos=2).groups)
    world.buffer.checkpoint(world.held, 1)
    Archiver(world.buffer, str(tmp_path / "archive"), wait_s=0).finish(threading.Event())
    archive = Archive(str(tmp_path / "archive"))
    (step, names), *_ = archive.steps().items()
    rows = archive.rows(names[0])
    assert {row["source"] for row in rows} == {"expert"}
    assert rows[0]["versions"] == [[{"epoch": None, "version": None, "tokens": 3}]]
    for before, after in zip(trained, archive.batch(step, names), strict=True):
        assert after.group.prompt == before.prompt
        for sample, kept in zip(before.samples, after.group.samples, strict=True):
            (one,), (other,) = sample.segments, kept.segments
            assert one.versions == other.versions == unversioned(3)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert sample.reward == kept.reward


def test_only_offline_tasks_take_insertions_and_nobody_samples_them(world: World) -> None:
    started(world, math={})
    with pytest.raises(ConfigError, match="task 'math' is sampled; only tasks with offline"):
        world.buffer.insert("math", finished_groups(1), source="expert")
    with pytest.raises(ConfigError, match="offline is not set"):
        world.buffer.call_task("insert", "math", "expert", 0)
    with pytest.raises(ConfigError, match="task 'demos' is offline"):
        world.admit(1, "demos")
    with pytest.raises(ConfigError, match="task 'demos' is offline"):
        world.buffer.open_batch("demos", "batch", "train", step=1)
    with pytest.raises(ConfigError, match="offline cannot change during a run"):
        world.buffer.change_rules("demos", {"offline": "false"})
    with pytest.raises(ValidationError, match="groups of an evaluation are always sampled"):
        TaskRules(batch_groups=1, offline=True, kind="eval")


BAD = {
    "sample 0: its status is aborted": replace(finished_sample(), status=SampleStatus.ABORTED),
    "sample 0: reward is missing": replace(finished_sample(), reward=None),
    r"sample 0: versions is .* must be unversioned\(3\)": make_sample(0),
    r"sample 0: logprobs\[1\] is nan": finished_sample(logprobs=[-1.0, np.nan, -1.0]),
    r"sample 0: response_ids\[0\] is -1": finished_sample(response=[-1]),
    "sample 0: response_ids is empty": finished_sample(response=[]),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_group_is_named_and_nothing_is_inserted(world: World, problem: str) -> None:
    started(world)
    groups = [*finished_groups(2), FinishedGroup(Prompt("p"), (BAD[problem], finished_sample()))]
    with pytest.raises(InvalidGroup, match=f"^group 2: {problem}"):
        world.buffer.insert("demos", groups, source="expert")
    assert world.statuses("demos") == {}


def test_arguments_that_make_no_sense_are_refused(world: World) -> None:
    started(world)
    with pytest.raises(InvalidGroup, match=r"^group 0: "):
        world.buffer.insert("demos", [FinishedGroup(Prompt(""), (finished_sample(),) * 2)], source="expert")
    with pytest.raises(InvalidGroup, match="group 0: the group has 3 samples, its task's group_size is 2"):
        world.buffer.insert("demos", finished_groups(1, 3), source="expert")
    with pytest.raises(ConfigError, match="source ''"):
        world.buffer.insert("demos", finished_groups(1), source="")
    with pytest.raises(ConfigError, match="after = -1"):
        world.buffer.insert("demos", finished_groups(2), source="expert", after=-1)
    assert world.statuses("demos") == {}


def test_logprobs_and_versions_cannot_be_absent_in_what_a_worker_puts(world: World) -> None:
    world.start()
    world.admit(2)
    one, two = world.lease(2)
    versioned = replace(finished_sample().segments[0], versions=(VersionSpan(1, 0, 3),))
    without = replace(finished_sample(), segments=(versioned,))
    results = [GroupResult(one, (without,) * 2), GroupResult(two, (finished_sample(logprobs=[-1.0] * 3),) * 2)]
    assert world.buffer.put(results) == [PutOutcome.FAILED, PutOutcome.FAILED]
    errors = [world.buffer.inspect("math", lease.group_id)["error"] for lease in (one, two)]
    assert "logprobs[0] is nan; expected a finite number, not above 0" in errors[0]
    assert "epoch and version count from 0" in errors[1]


def test_a_full_buffer_takes_the_rest_later(world: World, any_server: AnyServer) -> None:
    started(world)
    groups = [
        FinishedGroup(Prompt(f"prompt {number}"), (finished_sample(text="x" * MAX_CALL_BYTES),) * 2)
        for number in range(8)
    ]
    settings = PayloadSettings(max_buffer_bytes=2 * MAX_CALL_BYTES)
    with Buffer.connect(any_server.url, world.buffer.run, payloads=settings) as buffer:
        with pytest.raises(ServerRefused, match=r"the insertion stopped: raise payloads\.max_buffer_bytes"):
            buffer.insert("demos", groups, source="expert")
        assert 0 < buffer.inserted("demos", "expert") < 8
    assert world.buffer.insert("demos", groups, source="expert") > 0
    assert world.statuses("demos") == {"completed": 8}
    world.check()
