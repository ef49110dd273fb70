"""Batches of train steps: claimed for all tasks or for none, and released."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.calls.replies.claims import Claimed, Readiness, Shortfall
from rollq.buffer.errors import ConfigError
from support.any_server import AnyServer
from support.buffer_run import World


def test_a_fifo_claim_ahead_of_the_clock_waits_instead_of_sweeping_for_ever(world: World) -> None:
    world.start(math={"order": "arrival", "max_staleness": 0}).complete(4)
    world.claim(1)
    assert world.buffer.claim(world.held, 2, {"math": 2}) == Shortfall(2, {"math": 0}, {"math": 2})


def test_the_batch_of_a_step_is_the_same_for_whoever_asks_again(world: World) -> None:
    world.start().complete(5)
    claimed = world.claim(1)
    assert world.claim(1) == claimed
    assert world.buffer.claim(world.held, 1, {"math": 4}) == claimed, "the first sizes count"
    again = world.buffer.fetch(claimed.groups)
    assert [group.group_id for group in again] == [1, 2]
    assert again[0].samples[0].response_tokens == 3
    world.check()


def test_a_step_is_claimed_for_all_tasks_or_for_none(world: World) -> None:
    world.start(math={}, code={})
    world.complete(2, "math")
    short = world.buffer.claim(world.held, 1, {"math": 2, "code": 2})
    assert short == Shortfall(1, {"code": 0}, {"code": 2})
    assert world.statuses("math") == {"completed": 2}
    world.complete(2, "code")
    claimed = world.claim(1, math=2, code=2)
    assert [(group.task, group.group_id) for group in claimed.groups] == [
        ("math", 1),
        ("math", 2),
        ("code", 1),
        ("code", 2),
    ]
    world.check()


class Rank(Buffer):
    """Another rank, which takes code for ready when it is not, and lets others act before it undoes its torn claim."""

    moment: str
    meanwhile: Callable[[], None]

    def readiness(self, task: str, step: int) -> Readiness:
        return Readiness(1000, 0, 0)

    def call(self, name: str, key: str, *args: Any) -> Any:
        if name == self.moment:
            self.meanwhile()
        return super().call(name, key, *args)


@pytest.mark.parametrize("moment", ["plan", "release"], ids=["before it is undone", "while it is undone"])
def test_a_rank_that_undoes_a_torn_claim_takes_no_batch_from_another(
    moment: str, any_server: AnyServer, world: World
) -> None:
    world.start(math={}, code={})
    world.complete(2, "math")
    delivered: list[Claimed] = []

    def another_rank_gets_the_whole_batch() -> None:
        if not delivered:
            world.complete(2, "code")
            delivered.append(world.claim(1, math=2, code=2))

    with Rank.connect(any_server.url, world.buffer.run) as rank:
        rank.moment, rank.meanwhile = moment, another_rank_gets_the_whole_batch
        got = rank.claim(world.held, 1, {"math": 2, "code": 2})
        assert delivered
        if isinstance(got, Shortfall):  # it saw what was true when it looked, and asks again
            got = rank.claim(world.held, 1, {"math": 2, "code": 2})
    assert [got] == delivered
    assert world.claim(1, math=2, code=2) == got
    world.check()


def test_xb02_a_task_of_size_zero_is_always_ready(world: World) -> None:
    world.start(math={}, code={})
    world.complete(1, "math")
    assert [group.task for group in world.claim(1, math=1, code=0).groups] == ["math"]
    world.buffer.commit(world.held, 1)


def test_a_batch_of_less_than_nothing_is_refused(world: World) -> None:
    world.start().complete(1)
    with pytest.raises(ConfigError, match="task 'math': a batch of -1 groups; 0 to"):
        world.claim(1, math=-1)
    assert world.statuses() == {"completed": 1}


@pytest.mark.parametrize(("mode", "after"), [("return", {"completed": 2}), ("drop", {}), ("quarantine", {"failed": 2})])
def test_a_batch_can_be_released(world: World, mode: str, after: dict[str, int]) -> None:
    world.start().complete(2)
    world.claim(1)
    assert world.buffer.release(world.held, 1, cast(ReleaseMode, mode), claim_round=0) == 2
    assert world.buffer.release(world.held, 1, cast(ReleaseMode, mode), claim_round=0) == 0
    assert world.statuses() == after
    world.check()
    world.complete(2)
    assert len(world.claim(1).groups) == 2
