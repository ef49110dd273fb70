from rollq.buffer.buffer import Buffer
from rollq.buffer.store.pubsub import EventKind
from rollq.buffer.values.rollouts import SampleStatus
from support.buffer_run import World
from support.waiting import PATIENCE_S


def test_who_asks_for_a_task_sleeps_through_the_others(buffer: Buffer) -> None:
    world = World(buffer)
    world.start(math={}, code={}).admit(1, "math")
    with buffer.events(task="math") as math, buffer.events(task="code") as code:
        world.put(world.lease(1, "math"))
        assert math.wait(PATIENCE_S)
        assert not code.wait(0.1)
        buffer.report_worker("w", {"state": "busy"})
        assert math.wait(PATIENCE_S)
        assert code.wait(PATIENCE_S), "what is of the run as a whole is of each task"


def test_a_put_is_sent_to_nobody_who_waits_for_something_else(buffer: Buffer) -> None:
    world = World(buffer)
    world.start().admit(1)
    with buffer.events(EventKind.PUBLISH, EventKind.CONTROL):
        channels = {kind: f"{buffer.keys.events}:{kind}" for kind in EventKind}
        listeners = dict(buffer.client.pubsub_numsub(*channels.values()))
    assert {name for name, count in listeners.items() if count} == {
        channels[EventKind.PUBLISH].encode(),
        channels[EventKind.CONTROL].encode(),
    }


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
