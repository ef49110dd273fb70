"""The trainer: commits, checkpoints, restarts, epochs and published versions."""

from typing import Any

import pytest

from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.errors import (
    CheckpointOverdue,
    ConfigError,
    FencedError,
    HistoryGone,
    NotClaimed,
    StoreLost,
    TrainerHeld,
)
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import EMPTY_SAMPLE
from support.buffer_run import World


def test_a_checkpoint_drops_what_it_covers(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2, 3):
        world.train(step)
    world.buffer.checkpoint(world.held, 2)
    world.buffer.checkpoint(world.held, 2)
    assert world.statuses() == {"archived": 2}
    assert world.buffer.counts("math").dropped == {"trained": 4}
    leftovers = [
        key
        for key in world.buffer.client.scan_iter(match=f"*{world.buffer.run}*")
        if b"manifest" in key or b"plan" in key
    ]
    assert sorted(key.rsplit(b":", 2)[1:] for key in leftovers) == [
        [b"manifest", b"2"],
        [b"manifest", b"3"],
        [b"plan", b"3"],
    ]
    world.check()


def test_a_trainer_that_never_checkpoints_is_told(world: World) -> None:
    world.start(math={"max_uncheckpointed_steps": 2, "max_staleness": 5}).complete(6)
    world.train(1)
    world.train(2)
    with pytest.raises(CheckpointOverdue, match="last checkpoint is of step 0"):
        world.buffer.claim(world.held, 3, {"math": 2})
    world.buffer.checkpoint(world.held, 1)
    world.train(3)


def test_resuming_fresh_keeps_no_trained_batches(world: World) -> None:
    world.start(math={"resume": "fresh", "max_uncheckpointed_steps": 1, "max_staleness": 9}).complete(8)
    for step in (1, 2, 3):
        world.train(step)
    assert world.statuses() == {"completed": 2}
    assert world.buffer.counts("math").dropped == {"trained": 6}
    world.begin(1, launch_id="launch-2")
    assert world.statuses() == {"completed": 2}, "what was trained is gone, and its steps get other groups"
    world.train(2)
    world.check()


def test_commit_is_idempotent_and_leaves_no_gaps(world: World) -> None:
    world.start().complete(4)
    world.claim(1)
    world.claim(2)
    with pytest.raises(FencedError, match="step 2 cannot be committed: the last committed step is 0"):
        world.buffer.commit(world.held, 2)
    for step in (1, 1, 2):
        world.buffer.commit(world.held, step)
    assert world.statuses() == {"archived": 4}
    assert world.buffer.counts("math").progress["consumed"] == 4
    world.check()


def test_replay_serves_the_same_batches_again(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    before = [world.train(step) for step in (1, 2)] + [world.claim(3)]
    world.begin(0, launch_id="launch-2")
    assert world.statuses() == {"claimed": 6}
    clock = world.buffer.clock("math")
    assert (clock.epoch, clock.step, clock.version, clock.committed) == (2, 1, 0, 0)
    assert world.buffer.counts("math").progress["consumed"] == 0
    assert [world.train(step) for step in (1, 2, 3)] == before
    world.check()


def test_resuming_from_a_checkpoint_restores_its_counters(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2, 3):
        world.train(step)
    world.buffer.checkpoint(world.held, 1)
    world.begin(1, launch_id="launch-2")
    assert world.buffer.counts("math").progress["consumed"] == 2
    assert world.statuses() == {"claimed": 4}
    assert [group.group_id for group in world.train(2).groups] == [3, 4]
    world.check()


def test_the_trainers_checkpoint_wins_over_an_uncommitted_step(world: World) -> None:
    world.start().complete(4)
    world.claim(1)  # trained and checkpointed, but killed before commit
    world.begin(1, launch_id="launch-2")
    assert world.statuses() == {"archived": 2, "completed": 2}
    assert world.buffer.counts("math").progress["consumed"] == 2
    assert [group.group_id for group in world.claim(2).groups] == [3, 4]
    world.check()


def test_return_puts_the_batches_after_the_checkpoint_back(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2):
        world.train(step)
    world.claim(3)
    world.begin(1, launch_id="launch-2", mode="return")
    assert world.statuses() == {"archived": 2, "completed": 4}
    assert [group.group_id for group in world.train(2, math=4).groups] == [3, 4, 5, 6]
    world.check()


def test_regenerate_keeps_only_the_prompts(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.begin(1, launch_id="launch-2", mode="regenerate")
    assert world.statuses() == {"archived": 2, "pending": 2}
    leases = world.lease(2)
    assert [lease.prompt.content for lease in leases] == ["math 2", "math 3"]
    assert all(sample is EMPTY_SAMPLE for lease in leases for sample in lease.samples)
    world.check()


def test_tokens_of_dead_versions_count_as_the_checkpoints(world: World) -> None:
    world.start(math={"max_staleness": 1}).complete(2)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    world.complete(1, version=3)
    world.admit(1)
    dead = world.lease(1, version=3)
    world.buffer.expire("math")
    world.begin(1, launch_id="launch-2", mode="return")
    assert world.put(dead, version=3, epoch=1) == [PutOutcome.COMPLETED]
    claimed = world.claim(2)
    assert [group.oldest_version for group in claimed.groups] == [1, 1]
    assert claimed.counting[0].floors.counted(1, 9) == 1
    world.check()


def test_a_batch_that_is_served_again_is_as_old_as_it_was(world: World) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3):
        world.complete(2, version=step - 1)
        before = world.train(step)
    world.begin(0, launch_id="launch-2")
    for step in (1, 2, 3):
        again = world.train(step)
    assert again == before
    assert {counting.floors for counting in again.counting} == {Floors(((0, 0),))}, (
        "no token is of a dead epoch, as when it was claimed"
    )


def test_history_that_a_checkpoint_covers_is_gone(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.buffer.checkpoint(world.held, 2)
    with pytest.raises(HistoryGone, match="oldest step to resume from is 2"):
        world.begin(1, launch_id="launch-2")
    live = world.buffer.live_model()
    assert live is not None
    assert live.version == 2, "a refused resume moves nothing"
    world.begin(2, launch_id="launch-3")


def test_all_ranks_of_a_launch_share_one_epoch(world: World) -> None:
    world.start()
    assert world.buffer.join_epoch("launch-1") == world.held
    again = world.begin(0, launch_id="launch-1")
    assert again.epoch == 1
    assert world.buffer.join_epoch("launch-2") is None
    assert world.begin(0, launch_id="launch-2").epoch == 2
    assert world.buffer.join_epoch("launch-2") == world.held


def test_other_ranks_join_an_epoch_only_when_all_tasks_have_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    joined = []
    call_task = world.buffer.call_task

    def look_first(name: str, *args: object) -> object:
        joined.append(world.buffer.join_epoch("launch-2"))
        return call_task(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(world.buffer, "call_task", look_first)
    world.begin(0, launch_id="launch-2")
    assert set(joined) == {None}
    assert world.buffer.join_epoch("launch-2") == world.held


def test_a_launch_that_was_replaced_stays_replaced(world: World) -> None:
    world.start()
    second = world.begin(0, launch_id="launch-2")
    with pytest.raises(FencedError, match="launch-1 was replaced by launch launch-2"):
        world.begin(0, launch_id="launch-1", takeover=True)
    with pytest.raises(FencedError, match="'launch-1' was replaced by launch 'launch-2'"):
        world.buffer.join_epoch("launch-1")
    world.buffer.renew_trainer(second)
    third = world.begin(0, launch_id="launch-3")
    for replaced in ("launch-1", "launch-2"):
        with pytest.raises(FencedError):
            world.begin(0, launch_id=replaced)
    world.buffer.renew_trainer(third)


def test_a_late_copy_of_a_call_that_never_arrived_takes_no_run_back(world: World) -> None:
    world.start()
    buffer = world.buffer
    late = (
        "trainer",
        "launch-2",
        "nonce",
        0,
        "replay",
        "file:///weights",
        "digest",
        30_000,
        1,
        1,
        "",
        "{}",
    )  # epoch 1 is live
    third = world.begin(0, launch_id="launch-3")
    with pytest.raises(TrainerHeld):
        buffer.call("run_begin_epoch", buffer.keys.info, buffer.incarnation, *late)
    buffer.renew_trainer(third)
    live = buffer.live_model()
    assert live is not None
    assert live.digest == "digest-launch-3"


def test_the_last_thousand_launches_are_remembered(world: World) -> None:
    world.start()
    client, launches = world.buffer.client, world.buffer.keys.launches
    client.zadd(launches, {f"before-{number}": -number for number in range(1, 1001)})
    world.begin(0, launch_id="launch-2")
    assert client.zcard(launches) == 1000
    assert client.zscore(launches, "launch-1") == 1
    assert client.zscore(launches, "before-1000") is None


def test_a_replaced_trainer_is_refused_everything(world: World) -> None:
    world.start().complete(4)
    old = world.held
    world.claim(1)
    world.begin(0, launch_id="launch-2")
    buffer = world.buffer
    for attempt in (
        lambda: buffer.claim(old, 1, {"math": 2}),
        lambda: buffer.commit(old, 1),
        lambda: buffer.publish(old, 1, uri="u", digest="d"),
        lambda: buffer.checkpoint(old, 0),
        lambda: buffer.release(old, 1, "return", claim_round=0),
        lambda: buffer.renew_trainer(old),
    ):
        with pytest.raises(FencedError):
            attempt()
    assert world.statuses() == {"claimed": 2, "completed": 2}


def test_a_second_trainer_is_told_who_holds_the_run_or_takes_over(world: World) -> None:
    world.start()
    with pytest.raises(
        TrainerHeld, match=r"^trainer 'trainer' \(process \d+ on .+\) holds run .+ another 30 s: .+ takeover = true"
    ):
        world.begin(0, launch_id="other", trainer_id="rival")
    assert world.begin(0, launch_id="other", trainer_id="rival", takeover=True).epoch == 2


def test_a_second_trainer_that_could_not_resume_either_is_told_of_the_first(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(2)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    with pytest.raises(TrainerHeld, match=r"'trainer' .* holds run"):
        world.begin(0, launch_id="other", trainer_id="rival")
    with pytest.raises(HistoryGone):
        world.begin(0, launch_id="other", trainer_id="rival", takeover=True)


def test_a_published_version_never_falls_or_changes(world: World) -> None:
    world.start()
    publish = world.buffer.publish
    publish(world.held, 2, uri="u", digest="two")
    publish(world.held, 2, uri="u", digest="two")
    with pytest.raises(FencedError, match="version 1 cannot be published: 2 is live"):
        publish(world.held, 1, uri="u", digest="one")
    with pytest.raises(FencedError, match="already live with other weights"):
        publish(world.held, 2, uri="u", digest="other")
    assert world.buffer.client.get(world.buffer.keys.model_version) == b"2"


@pytest.mark.parametrize("mode", ["return", "regenerate"])
def test_a_step_that_a_rewind_undid_cannot_be_resumed_from(world: World, mode: ResumeMode) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2, 3):
        world.train(step)
    world.buffer.checkpoint(world.held, 1)
    world.begin(1, mode=mode, launch_id="launch-2")
    with pytest.raises(HistoryGone, match=r"a rewind undid step 3.*the newest step to resume from is 1"):
        world.begin(3, launch_id="launch-3")
    world.buffer.renew_trainer(world.held)  # a refused resume moves nothing
    world.begin(1, launch_id="launch-4")
    world.check()


@pytest.mark.parametrize("mode", ["replay", "return", "regenerate"])
def test_a_checkpoint_that_was_left_behind_is_known_by_its_lineage(world: World, mode: ResumeMode) -> None:
    buffer = world.start(math={"max_staleness": 9}).buffer
    world.complete(12)
    for step in (1, 2, 3):
        world.train(step)
    left_behind = buffer.lineage_of(world.held)
    world.begin(1, mode=mode, launch_id="launch-2")
    if mode == "regenerate":
        world.put(world.lease(4))
    for step in (2, 3, 4):
        world.train(step)  # the same steps, of other weights
    alive = buffer.lineage_of(world.held)

    def resume(step: int, lineage: str, *, accept_new_store: bool = False) -> None:
        buffer.begin_epoch(
            trainer_id="trainer", launch_id=f"{step} {lineage}", from_step=step, uri="u", digest="d", lineage=lineage,
            accept_new_store=accept_new_store, takeover=True,
        )  # fmt: skip

    if mode == "replay":  # of the same batches
        resume(3, left_behind)
    else:
        with pytest.raises(HistoryGone, match=r"saved in epoch 1.*undone its steps after 1"):
            resume(3, left_behind)
        with pytest.raises(HistoryGone, match="undone"):
            resume(3, left_behind, accept_new_store=True)
        resume(1, left_behind)
    resume(3, alive)
    with pytest.raises(ConfigError, match="lineage 'x'"):
        resume(3, "x")
    world.check()


def test_a_task_that_joined_late_keeps_no_trainer_from_older_steps(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(12)
    for step in range(1, 5):
        world.train(step)
    world.begin(3, launch_id="launch-2")
    world.start(2, launch_id="launch-3", code={"max_staleness": 9})
    world.complete(2, "code")
    assert len(world.claim(3, math=2, code=0).groups) == 2
    world.buffer.commit(world.held, 3)
    assert len(world.claim(4, math=2, code=0).groups) == 2
    world.buffer.commit(world.held, 4)
    assert len(world.claim(5, math=2, code=2).groups) == 4
    world.check()


def test_a_released_batch_of_an_older_trainer_cannot_be_resumed_after(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.begin(1, launch_id="launch-2")
    world.buffer.release(world.held, 2, "return", claim_round=world.claim(2).claim_round)
    with pytest.raises(HistoryGone, match="a rewind undid step 2"):
        world.begin(2, launch_id="launch-3")


@pytest.mark.parametrize("how", ["release", "regenerate_replays"])
def test_steps_that_are_trained_anew_during_a_replay_are_known_by_their_lineage(world: World, how: str) -> None:
    buffer = world.start(math={"max_staleness": 9}).buffer
    world.complete(14)
    for step in (1, 2, 3):
        world.train(step)
    left_behind = buffer.lineage_of(world.held)
    world.begin(0, launch_id="launch-2")
    world.train(1)
    if how == "release":
        buffer.release(world.held, 2, "drop", claim_round=world.claim(2).claim_round)
    else:
        buffer.regenerate_replays(world.held, 1)
    for step in (2, 3, 4):
        world.train(step)

    def resume(step: int) -> None:
        buffer.begin_epoch(
            trainer_id="trainer", launch_id=str(step), from_step=step, uri="u", digest="d", lineage=left_behind,
            takeover=True,
        )  # fmt: skip

    with pytest.raises(HistoryGone, match=r"saved in epoch 1.*undone its steps after 1"):
        resume(3)
    resume(1)
    world.check()


def test_a_replayed_batch_that_another_rank_has_is_not_regenerated(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    before = [world.train(step) for step in (1, 2, 3)]
    world.begin(0, launch_id="launch-2")
    world.train(1)
    assert world.claim(2) == before[1]  # by a rank that is ahead
    world.buffer.regenerate_replays(world.held, 1)
    assert world.claim(2) == before[1]
    assert world.statuses() == {"archived": 2, "claimed": 2, "pending": 2}
    world.check()


def test_a_late_copy_of_a_checkpoint_uncovers_no_step(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    buffer = world.buffer
    for step in (1, 2, 3):
        world.train(step)
        buffer.checkpoint(world.held, step)
    buffer.call("forget_plans", buffer.keys.info, buffer.incarnation, world.held.epoch, world.held.nonce, 1, 1, "")
    assert buffer.client.hget(buffer.keys.trainer, "covered") == b"3"


def test_a_dead_trainer_holds_the_run_for_one_lease_although_the_servers_clock_was_set_back(world: World) -> None:
    world.start()
    deadline_ms = world.buffer.server_ms() + 3_600_000
    world.buffer.client.hset(world.buffer.keys.trainer, "deadline_ms", deadline_ms)
    with pytest.raises(TrainerHeld, match=r"holds run .* lasts another 30 s"):
        world.begin(0, launch_id="launch-2", trainer_id="another")
    client: Any = world.buffer.client
    assert int(client.hget(world.buffer.keys.trainer, "deadline_ms")) <= world.buffer.server_ms() + 30_000


def test_a_checkpoint_is_recorded_while_the_buffer_is_saved(world: World) -> None:
    world.start(math={"max_uncheckpointed_steps": 1, "max_staleness": 9}).complete(6)
    world.train(1)
    world.buffer.call_task("hold_for_saving", "math", "a save", 60_000)
    world.buffer.checkpoint(world.held, 1)
    assert (world.buffer.clock("math").checkpoint, world.buffer.clock("math").history) == (1, 0)
    assert world.statuses() == {"archived": 2, "completed": 4}
    world.train(2)
    world.buffer.call_task("hold_for_saving", "math", "a save", 0)
    world.buffer.checkpoint(world.held, 2)
    assert world.buffer.clock("math").history == 2
    assert world.statuses() == {"completed": 2}
    world.check()


def test_a_store_that_lost_its_last_moments_is_named_when_a_step_is_committed(world: World) -> None:
    world.start().complete(2)
    world.claim(1)
    world.buffer.release(world.held, 1, "return", claim_round=0)  # as if the server had forgotten the claim
    with pytest.raises(NotClaimed, match=r"step 1 cannot be committed.*lost its last moments"):
        world.buffer.commit(world.held, 1)


@pytest.mark.parametrize("mode", ["replay", "return", "regenerate"])
def test_steps_before_the_first_of_a_store_are_rewound_like_others(world: World, mode: ResumeMode) -> None:
    world.start(math={"max_staleness": 19})
    world.begin(10, launch_id="with a checkpoint of another store")
    world.complete(8)
    world.train(11)
    world.begin(5, mode="return", launch_id="with an older one")
    before = [world.train(step) for step in (6, 7, 8)]
    world.begin(6, mode=mode, launch_id="with one of this store")
    assert world.buffer.clock("math").claimed_step == (8 if mode == "replay" else 6)
    assert world.statuses()["archived"] == 2
    if mode == "replay":
        assert world.claim(7) == before[1]
        world.buffer.release(world.held, 7, "return", claim_round=0)
    world.check()


@pytest.mark.parametrize("mode", ["replay", "return", "regenerate"])
def test_steps_before_a_task_joined_are_rewound_like_others(world: World, mode: ResumeMode) -> None:
    world.start(math={"max_staleness": 19}).complete(12)
    for step in range(1, 6):
        world.train(step)
    world.buffer.register_task("code", TaskRules(batch_groups=2, group_size=2, max_staleness=19))
    world.complete(6, "code")
    world.begin(1, mode="return", launch_id="launch-2")
    for step in (2, 3):
        world.train(step, math=2, code=2)
    world.begin(2, mode=mode, launch_id="launch-3")
    moved = {"replay": "claimed", "return": "completed", "regenerate": "pending"}[mode]
    assert world.statuses("code") == {"archived": 2, moved: 4 if mode == "return" else 2} | (
        {} if mode == "return" else {"completed": 2}
    )
    world.check()


def test_a_checkpoint_covers_a_step_that_was_committed_before_a_task_joined(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(2)
    world.claim(1)
    world.buffer.commit(world.held, 1)  # and publishes only every few steps
    world.buffer.register_task("code", TaskRules(batch_groups=2, group_size=2))
    with pytest.raises(NotClaimed, match="step 2 is not committed yet"):
        world.buffer.checkpoint(world.held, 2)
    assert world.buffer.clock("code").committed == 0
    world.buffer.checkpoint(world.held, 1)
    assert world.buffer.clock("code").committed == 1
    world.check()


def test_a_hold_of_the_run_that_was_evicted_is_not_said_to_be_replaced(world: World) -> None:
    world.start()
    world.buffer.client.delete(world.buffer.keys.trainer)
    with pytest.raises(StoreLost, match=r":trainer is missing: .* or evicts keys \(maxmemory-policy\)"):
        world.buffer.renew_trainer(world.held)
