from rollq.buffer.buffer import Buffer
from rollq.buffer.rollouts import SampleStatus
from rollq.buffer.store.events import EventKind
from support.buffer_run import World
from support.waiting import PATIENCE_S


def test_who_asks_for_kinds_of_wake_ups_sleeps_through_the_others(buffer: Buffer) -> None:
    world = World(buffer)
    world.start().admit(2)
    with (
        buffer.events(EventKind.PUT) as puts,
        buffer.events(EventKind.COMPLETED, EventKind.PUBLISH) as others,
        buffer.events() as everything,
    ):
        world.put(world.lease(1))
        assert others.wait(PATIENCE_S)
        assert everything.wait(PATIENCE_S)
        assert not puts.wait(0.1)
        world.put(world.lease(1), status=SampleStatus.FAILED)
        assert puts.wait(PATIENCE_S)
        assert everything.wait(PATIENCE_S)
        assert not others.wait(0.1)
        buffer.publish(world.held, 1, uri="", digest="d1")
        assert others.wait(PATIENCE_S)
