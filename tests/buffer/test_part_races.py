"""Two ranks take a batch while it fills: whatever the order of their calls, they train the same parts."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from rollq.buffer.calls.replies.claims import Claimed, Shortfall
from support.any_server import AnyServer
from support.buffer_run import World
from support.interleavings import PausingBuffer, Role, explore

pytestmark = pytest.mark.plain_server  # states are saved and restored by one transaction over all keys

SIZES = {"math": 2, "code": 1}


@pytest.fixture
def roles(any_server: AnyServer, world: World) -> Iterator[list[PausingBuffer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PausingBuffer.connect(any_server.url, world.buffer.run)) for _ in range(3)]


def test_two_ranks_and_a_worker_in_any_order_end_with_the_same_parts(world: World, roles: list[PausingBuffer]) -> None:
    rules: dict[str, object] = {"max_staleness": 0, "batch_groups": 2}
    world.start(math=rules, code={**rules, "batch_groups": 1})
    world.admit(2)
    world.admit(1, "code")
    first, *others = [*world.lease(2), *world.lease(1, "code")]
    world.put([first])
    for role in roles:
        assert role.incarnation  # read once, so that all orders have the same trips

    def rank(role: Role) -> Claimed | Shortfall:
        found = role.buffer.claim(world.held, 1, SIZES, so_far=True)
        if isinstance(found, Claimed):
            role.buffer.divide(world.held, found)
        return role.buffer.claim(world.held, 1, SIZES, so_far=True)

    def worker(role: Role) -> None:
        role.pause()
        world.put(others)

    def check(results: Mapping[str, Any]) -> None:
        shorter, longer = sorted((results["rank 0"], results["rank 1"]), key=lambda found: len(found.parts))
        assert shorter.parts, "each has divided what it saw"
        assert longer.parts[: len(shorter.parts)] == shorter.parts
        assert longer.groups[: shorter.parts[-1]] == shorter.groups[: shorter.parts[-1]]
        whole = world.buffer.claim(world.held, 1, SIZES, so_far=True)
        assert isinstance(whole, Claimed)
        assert whole.parts[: len(longer.parts)] == longer.parts
        assert len(whole.groups) == 3

    acts = {"rank 0": (roles[0], rank), "rank 1": (roles[1], rank), "worker": (roles[2], worker)}
    assert explore(world, acts, check) > 10
