"""Batches that are taken before they are whole: which groups they have, and that nothing changes them afterwards."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rollq.buffer.calls.replies.claims import Claimed, Counting, Shortfall
from rollq.buffer.errors import HistoryGone, NotClaimed
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Lease, Status
from support.buffer_run import World
from support.finished_groups import finished_groups

SYNC: dict[str, object] = {"max_staleness": 0, "batch_groups": 4}


def so_far(
    world: World, step: int = 1, sizes: dict[str, int] | None = None, *, known: Claimed | None = None, math: int = 4
) -> Claimed:
    claimed = world.buffer.claim(world.held, step, sizes or {"math": math}, so_far=True, known=known)
    assert isinstance(claimed, Claimed), claimed
    return claimed


def ids(claimed: Claimed) -> list[Any]:
    """Of several tasks, with the name of each."""
    tasks = {group.task for group in claimed.groups}
    return [group.group_id if len(tasks) == 1 else (group.task, group.group_id) for group in claimed.groups]


def started(world: World, count: int = 4, task: str = "math") -> list[Lease]:
    world.admit(count, task)
    return sorted(world.lease(count, task), key=lambda lease: lease.group_id)


def test_a_batch_grows_in_the_order_in_which_its_groups_are_finished(world: World) -> None:
    leases = started(world.start(math=SYNC))
    assert isinstance(world.buffer.claim(world.held, 1, {"math": 4}, so_far=True), Shortfall)
    for done, number in enumerate((2, 0, 3), start=1):
        world.put([leases[number]])
        claimed = so_far(world)
        assert ids(claimed) == [leases[at].group_id for at in (2, 0, 3)][:done]
        assert claimed.lack is not None
        assert claimed.lack.ready == {"math": done}
    world.put([leases[1]])
    whole = so_far(world)
    assert whole.lack is None
    assert ids(whole) == [3, 1, 4, 2]
    assert world.buffer.claim(world.held, 1, {"math": 4}) == whole
    world.buffer.commit(world.held, 1, {"math": [3, 1, 4, 2]})
    world.check()


def test_what_is_known_is_not_read_again(world: World) -> None:
    leases = started(world.start(math=SYNC))
    world.put(leases[:2])
    before = so_far(world)
    world.put(leases[2:3])
    assert so_far(world, known=before) == so_far(world)
    world.buffer.release(world.held, 1, "return", claim_round=before.claim_round)
    assert ids(so_far(world, known=before)) == [1, 2, 3], "of another round: from its first group on"


def test_a_whole_batch_is_not_taken_while_another_call_has_its_first_groups_only(world: World) -> None:
    leases = started(world.start(math=SYNC))
    world.put(leases[:2])
    so_far(world)
    short = world.buffer.claim(world.held, 1, {"math": 4})
    assert isinstance(short, Shortfall)
    assert short.ready == {"math": 2}
    with pytest.raises(NotClaimed, match="still fills"):
        world.buffer.commit(world.held, 1)
    world.put(leases[2:])
    assert ids(world.claim(1, math=4)) == [1, 2, 3, 4]
    world.check()


def test_only_groups_that_the_whole_batch_would_have_are_taken_early(world: World) -> None:
    leases = started(world.start(math=SYNC), 6)
    world.put([leases[5], leases[4], leases[1]])
    claimed = so_far(world)
    assert ids(claimed) == [2], "three that are not finished may come before the others"
    world.put([leases[0]])
    assert ids(so_far(world)) == [2, 1], "two may come before those"
    world.put(leases[2:4])
    assert ids(so_far(world)) == [2, 1, 3, 4], "those that a claim of the whole batch would take, in another order"
    world.check()


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::17], ids=str)
def test_a_batch_has_the_groups_of_a_whole_claim_whatever_finishes_first(world: World, order: tuple[int, ...]) -> None:
    leases = started(world.start(math=SYNC), 5)
    for number in order:
        world.put([leases[number]])
        world.buffer.claim(world.held, 1, {"math": 4}, so_far=True)
    assert sorted(ids(so_far(world))) == [1, 2, 3, 4]
    world.check()


def test_where_stragglers_expire_the_first_to_finish_are_the_batch(world: World) -> None:
    leases = started(world.start(math={**SYNC, "stragglers": "expire"}), 6)
    world.put([leases[5]])
    assert ids(so_far(world)) == [6]
    world.put(leases[2:5])
    assert ids(so_far(world)) == [6, 3, 4, 5]


def test_a_batch_that_is_short_for_good_is_whole_with_what_there_is(world: World) -> None:
    leases = started(world.start(math=SYNC))
    world.put(leases[:2])
    so_far(world)
    world.put(leases[2:3])
    world.buffer.hand_back(leases[3:])
    claimed = world.buffer.claim(world.held, 1, {"math": 4}, short_ok=True)
    assert isinstance(claimed, Claimed)
    assert ids(claimed) == [1, 2, 3]
    assert claimed.lack is None
    world.buffer.commit(world.held, 1)
    world.check()


def test_a_batch_that_fills_may_get_smaller_but_not_larger(world: World) -> None:
    leases = started(world.start(math={**SYNC, "max_staleness": 1}), 6)
    world.put(leases[:5])
    first = so_far(world, math=6)
    assert ids(first) == [1, 2, 3, 4, 5]
    assert so_far(world, math=9).lack is not None
    world.buffer.release(world.held, 1, "return", claim_round=first.claim_round)
    assert ids(so_far(world, math=6)) == [1, 2, 3, 4, 5]
    assert so_far(world, math=5).lack is None, "fewer groups are wanted: it is whole"
    assert ids(so_far(world, math=9)) == [1, 2, 3, 4, 5]


def test_the_parts_of_a_batch_are_the_first_that_were_fixed(world: World) -> None:
    leases = started(world.start(math=SYNC))
    world.put(leases[:1])
    mine = so_far(world)
    world.put(leases[1:2])
    theirs = so_far(world)
    assert world.buffer.divide(world.held, mine)
    assert world.buffer.divide(world.held, theirs), "another rank was first"
    assert so_far(world).parts == (1,)
    assert world.buffer.divide(world.held, so_far(world))
    assert so_far(world).parts == (1, 2)
    world.buffer.release(world.held, 1, "return", claim_round=mine.claim_round)
    assert not world.buffer.divide(world.held, mine), "a late copy"
    assert so_far(world).parts == ()


def test_tasks_fill_one_by_one_and_their_groups_are_in_the_order_of_the_parts(world: World) -> None:
    sizes = {"math": 2, "code": 2}
    world.start(math={**SYNC, "batch_groups": 2}, code={**SYNC, "batch_groups": 2})
    math, code = started(world, 2), started(world, 2, "code")
    world.put(code[1:])
    first = so_far(world, 1, sizes)
    assert ids(first) == [2]
    assert first.lack is not None
    assert first.lack.ready == {"math": 0, "code": 1}
    assert world.buffer.divide(world.held, first)
    world.put([math[0]])
    world.put(code[:1])
    second = so_far(world, 1, sizes, known=first)
    assert ids(second) == [("code", 2), ("math", 1), ("code", 1)]
    assert isinstance(world.buffer.claim(world.held, 1, sizes), Shortfall), "nothing is undone: a part was given out"
    assert world.statuses("code") == {"claimed": 2}
    assert world.buffer.divide(world.held, second)
    world.put([math[1]])
    whole = world.claim(1, **sizes)
    assert ids(whole) == [("code", 2), ("math", 1), ("code", 1), ("math", 2)]
    assert whole.parts == (1, 3)
    world.buffer.commit(world.held, 1, {"math": [1, 2], "code": [2, 1]})
    world.check()


@pytest.mark.parametrize("mode", ["replay", "return", "regenerate"])
def test_a_restart_serves_what_there_was_of_a_batch_or_gives_it_back(world: World, mode: str) -> None:
    leases = started(world.start(math=SYNC))
    world.put([leases[3], leases[1]])
    before = so_far(world)
    assert world.buffer.divide(world.held, before)
    world.begin(0, mode=mode, launch_id="second")
    if mode == "replay":
        world.put(leases[:1])
        after = so_far(world)
        assert ids(after) == [2, 4, 1] == [*ids(before), 1]
        assert after.parts == (2,)
    else:
        waiting = "completed" if mode == "return" else "pending"
        assert world.statuses() == {"running": 2, waiting: 2}
        assert not world.buffer.send("HGET", world.buffer.keys.plan(1), "parts")
    world.check()


def test_groups_that_join_after_a_restart_are_as_old_as_they_count_by_then(world: World) -> None:
    world.start(math={"max_staleness": 9, "batch_groups": 2, "archive": True})
    world.complete(2)
    world.train(1)
    leases = started(world, 2)
    world.put(leases[:1])
    before = so_far(world, 2, math=2)
    world.begin(0, launch_id="second")
    world.train(1)
    world.put(leases[1:], version=1, epoch=1)
    whole = so_far(world, 2, math=2)
    assert whole.counting == (before.counting[0], Counting(Floors(((1, 0),)), 10))
    assert before.counting[0].floors != whole.counting[1].floors
    world.buffer.commit(world.held, 2)
    noted = [world.buffer.inspect("math", group.group_id)["floors"] for group in whole.groups]
    assert [Floors.decode(floors) for floors in noted] == [counting.floors for counting in whole.counting]


def test_a_checkpoint_of_a_step_whose_batch_is_not_whole_is_refused(world: World) -> None:
    """The server has lost its last moments: the trainer had the whole batch."""
    leases = started(world.start(math=SYNC))
    world.put(leases[:1])
    so_far(world)
    with pytest.raises(HistoryGone, match="not whole: the server lost its last moments; resume from step 0"):
        world.begin(1, launch_id="second")


def test_a_preview_has_what_a_batch_has_already_first(world: World) -> None:
    leases = started(world.start(math=SYNC))
    world.put([leases[2]])
    so_far(world)
    world.put([leases[0]])
    assert [group.group_id for group in world.buffer.preview(1, {"math": 4})] == [3, 1]
    assert world.buffer.readiness("math", 1).ready == 2


def test_groups_are_trained_again_from_a_batch_that_filled(world: World) -> None:
    world.start(math={"max_staleness": 3, "batch_groups": 2, "max_uses": 2})
    leases = started(world, 2)
    world.put(leases[:1])
    so_far(world, math=2)
    world.put(leases[1:])
    so_far(world, math=2)
    world.buffer.commit(world.held, 1)
    assert ids(so_far(world, 2, math=2)) == [3, 4], "the copies of both"
    world.check()


def test_inserted_groups_fill_a_batch_as_they_come(world: World) -> None:
    world.start(math={"offline": True, "batch_groups": 4})
    for count in (1, 3, 5):
        world.buffer.insert("math", finished_groups(count), source="expert")
        assert len(ids(so_far(world))) == min(count, 4)
    world.check()


def test_a_batch_that_fills_is_saved_and_restored(world: World, tmp_path: Any) -> None:
    leases = started(world.start(math=SYNC))
    world.put(leases[:2])
    before = so_far(world)
    assert world.buffer.divide(world.held, before)
    world.buffer.save(tmp_path / "saved")
    keys = list(world.buffer.client.scan_iter(match=f"rollq:{{{world.buffer.run}*"))
    world.buffer.client.unlink(*keys)
    world.buffer.restore(tmp_path / "saved")
    world.begin(0, launch_id="second")
    after = so_far(world)
    assert (ids(after), after.parts) == (ids(before), before.parts)


@pytest.mark.parametrize("status", [Status.PENDING, Status.ABORTED, Status.EXPIRED], ids=str)
def test_no_unfinished_group_is_overtaken(world: World, status: Status) -> None:
    """However a group waits, it may come before those that are finished."""
    leases = started(world.start(math=SYNC), 5)
    prefix = task_keys(world.buffer.run, "math").prefix
    world.put(leases[1:4])
    move: dict[Status, Callable[[], object]] = {
        Status.PENDING: lambda: world.buffer.hand_back(leases[:1]),
        Status.ABORTED: lambda: world.put(leases[:1], status="a"),
        Status.EXPIRED: lambda: world.buffer.client.zadd(f"{prefix}expired", {"99": 99}),
    }
    before = ids(so_far(world))
    assert before == [2, 3]
    move[status]()
    assert ids(so_far(world)) == before


@pytest.mark.parametrize("sizes", [{"math": 2}, {"code": 1, "math": 2}, {"code": 1, "z": 1}])
def test_a_refused_commit_of_a_batch_that_still_fills_moves_no_other_task(world: World, sizes: dict[str, int]) -> None:
    """Neither one without groups in the batch nor one whose groups are all there, also where another has none yet."""
    world.start(code={}, math={}, z={})
    world.complete(1, "code")
    world.complete(1)
    claimed = world.buffer.claim(world.held, 1, sizes, so_far=True)
    assert isinstance(claimed, Claimed)
    assert claimed.lack is not None
    with pytest.raises(NotClaimed):
        world.buffer.commit(world.held, 1)
    assert world.buffer.clock("code").committed == 0
    assert world.buffer.release(world.held, 1, "return", claim_round=claimed.claim_round) == len(claimed.groups)
