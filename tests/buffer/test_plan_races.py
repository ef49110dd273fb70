"""Rank 0 plans a step anew while another rank claims it: whatever the order, all ranks get one batch."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from rollq.buffer.calls.replies.claims import Claimed, Shortfall
from support.any_server import AnyServer
from support.buffer_run import World
from support.interleavings import Act, PausingBuffer, Role, explore

pytestmark = pytest.mark.plain_server  # states are saved and restored by one transaction over all keys

OLD, NEW = {"math": 2, "code": 2}, {"math": 4, "code": 0}


@pytest.fixture
def ranks(any_server: AnyServer, world: World) -> Iterator[tuple[PausingBuffer, PausingBuffer, PausingBuffer]]:
    """Two ranks and a worker."""
    with ExitStack() as stack:
        made = [stack.enter_context(PausingBuffer.connect(any_server.url, world.buffer.run)) for _ in range(3)]
        yield made[0], made[1], made[2]


ORDER = ("rank 0",) * 2 + ("rank 1", "rank 0") + ("rank 1",) * 4 + ("rank 0",) * 9 + ("rank 1",) * 2
"""Rank 0 has seen that nothing is claimed, rank 1 claims one task by the old plan, rank 0 replans, releases and claims
anew, and rank 1 claims the other task: it is of the new batch."""
SLOW = [pytest.param(code, (), marks=pytest.mark.slow) for code in ("is there", "comes")]


@pytest.mark.parametrize(("code", "only"), [("stays empty", ()), ("is there", ORDER), *SLOW])
@pytest.mark.parametrize("sizes", [OLD, NEW], ids=["before the change", "after the change"])
def test_all_ranks_get_one_batch_however_a_new_plan_and_a_claim_meet(
    sizes: dict[str, int],
    code: str,
    only: tuple[str, ...],
    world: World,
    ranks: tuple[PausingBuffer, PausingBuffer, PausingBuffer],
) -> None:
    """`sizes` are the sizes that the other rank knows when it claims. `code` is the state of the task that was
    short."""
    world.start(math={}, code={})
    world.complete(5, "math")
    world.admit(2, "code")
    leases = world.lease(2, "code")
    assert isinstance(world.buffer.claim(world.held, 1, OLD), Shortfall)
    if code == "is there":
        world.put(leases)
    for rank in ranks:
        assert rank.incarnation  # read once, so that all orders have the same trips

    def rank_0(role: Role) -> Claimed | Shortfall:
        role.buffer.plan_anew(world.held, 1, NEW)
        return role.buffer.claim(world.held, 1, NEW)

    def rank_1(role: Role) -> Claimed | Shortfall:
        return role.buffer.claim(world.held, 1, sizes)

    def worker(role: Role) -> None:
        role.pause()
        world.put(leases)

    kinds = set()

    def check(results: Mapping[str, Any]) -> None:
        batches = [one for one in results.values() if isinstance(one, Claimed)]
        if isinstance(world.buffer.claim(world.held, 1, NEW), Shortfall):  # the other rank has planned it, as it was
            assert world.buffer.plan_anew(world.held, 1, NEW)
        batches += [world.claim(1, **NEW), world.claim(1, **OLD)]
        assert len({(tuple((g.task, g.group_id) for g in one.groups), one.claim_round) for one in batches}) == 1
        ids = [(group.task, group.group_id) for group in world.buffer.fetch(batches[0].groups)]
        assert len(ids) == len(set(ids))
        kinds.add((len(ids), *(type(results[name]).__name__ for name in ("rank 0", "rank 1"))))
        for task, total in (("math", 5), ("code", 2)):
            mine = sum(name == task for name, _ in ids)
            statuses = world.statuses(task)
            assert statuses.get("claimed", 0) == mine
            assert sum(statuses.values()) == total
        world.check()
        world.buffer.publish(world.held, 1, uri="file:///weights/1", digest="digest-1")
        world.buffer.commit(world.held, 1)
        world.check()

    acts: dict[str, tuple[PausingBuffer, Act]] = {"rank 0": (ranks[0], rank_0), "rank 1": (ranks[1], rank_1)}
    if code == "comes":
        acts["worker"] = (ranks[2], worker)
    checked = explore(world, acts, check, only=only)
    assert checked == 1 if only else checked > 20
    assert {groups for groups, *_ in kinds} <= {2, 4, 6}  # of the old sizes, the new ones, or both
    assert ("Claimed", "Claimed") in {kind[1:] for kind in kinds}
