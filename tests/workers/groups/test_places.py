"""Places for samples: how many are generated at the same time, and which one is next."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Lease, Prompt
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.places import AllPlaces, Places
from rollq.workers.groups.sample_order import turn_of
from rollq.workers.wake_signals import Signals


def lease(group_id: int, step: int = 1, *, expected_tokens: float = 0.0, samples: int = 4) -> HeldLease:
    made = Lease(
        task="math", group_id=group_id, attempt=1, nonce="n", tries=1, prompt=Prompt("x"),
        samples=(EMPTY_SAMPLE,) * samples, step=step, expected_tokens=expected_tokens,
    )  # fmt: skip
    return HeldLease(made, 0.0, 1e9, expected_tokens=expected_tokens)


class Play:
    """Samples that take places, in the order in which they got them."""

    def __init__(self, capacity: int) -> None:
        self.places = Places(lambda: capacity, Signals())
        self.order: list[int] = []
        self.tasks: dict[int, list[asyncio.Task[None]]] = {}
        self.gates: dict[int, list[asyncio.Event]] = {}

    def enter(self, held: HeldLease) -> None:
        group_id = held.lease.group_id
        self.places.enter(held, len(held.lease.samples))
        self.gates[group_id] = [asyncio.Event() for _ in held.lease.samples]
        self.tasks[group_id] = [asyncio.create_task(self._sample(held, gate)) for gate in self.gates[group_id]]

    async def _sample(self, held: HeldLease, gate: asyncio.Event) -> None:
        async with self.places.place(held):
            self.order.append(held.lease.group_id)
            await gate.wait()

    async def end(self, group_id: int, count: int = 1) -> None:
        """End this many samples of a group that have a place."""
        for gate in [gate for gate in self.gates[group_id] if not gate.is_set()][:count]:
            gate.set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await scene()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


def test_a_finished_samples_place_goes_to_the_next_sample_and_not_to_the_next_group() -> None:
    async def scene() -> None:
        world = Play(5)
        world.enter(lease(1))
        world.enter(lease(2))
        await settle()
        assert world.order == [1, 1, 1, 1, 2]
        await world.end(1)
        assert world.order == [1, 1, 1, 1, 2, 2]
        assert world.places.taken == 5
        assert world.places.free < 0  # no room for a third group, though one sample has ended

    play(scene)


def test_siblings_of_a_group_that_has_begun_go_before_an_earlier_step() -> None:
    async def scene() -> None:
        world = Play(1)
        world.enter(lease(1, step=2))
        await settle()
        world.enter(lease(2, step=1, expected_tokens=40.0))
        world.enter(lease(3, step=1, expected_tokens=900.0))
        for _ in range(4):
            await world.end(world.order[-1])
        assert world.order == [1, 1, 1, 1, 3]  # of one step, the longest answers first

    play(scene)


def test_turns_are_by_step_then_evaluations_last_then_unknown_lengths_then_the_longest() -> None:
    def of(step: int, group_id: int, *, evaluation: bool = False, tokens: float = 0.0) -> Lease:
        return Lease(
            task="math", group_id=group_id, attempt=1, nonce="n", tries=1, prompt=Prompt("x"), samples=(),
            step=step, evaluation=evaluation, expected_tokens=tokens,
        )  # fmt: skip

    waiting = [of(2, 1), of(1, 2), of(1, 3, tokens=50.0), of(1, 4, evaluation=True), of(1, 5)]
    ordered = sorted(waiting, key=lambda lease: turn_of(lease, placed=False, expected_tokens=lease.expected_tokens))
    assert [lease.group_id for lease in ordered] == [2, 5, 3, 4, 1]


def test_a_group_that_leaves_gives_back_what_it_had_not_begun() -> None:
    async def scene() -> None:
        world = Play(2)
        held = lease(1)
        world.enter(held)
        await settle()
        assert world.places.open == 4
        held.finished = True
        world.places.look()  # those that wait end at once
        await world.end(1, count=4)
        world.places.leave(held)
        assert (world.places.open, world.places.taken, world.places.behind, world.places.free) == (0, 0, 0, 2)

    play(scene)


@pytest.mark.parametrize("waits", [True, False])
def test_a_cancelled_sample_leaves_no_place_taken(*, waits: bool) -> None:
    async def scene() -> None:
        world = Play(1)
        world.enter(lease(1, samples=2))
        await settle()
        world.tasks[1][int(waits)].cancel()
        await settle()
        assert world.places.taken == 1  # of the other one
        await world.end(1, count=2)
        assert world.places.taken == 0

    play(scene)


def test_slow_judges_leave_room_for_a_quarter_more() -> None:
    places, held = Places(lambda: 8, Signals()), [lease(number) for number in range(4)]

    async def generated(entry: HeldLease) -> None:
        async with places.place(entry):
            pass

    async def scene() -> None:
        for entry in held[:2]:
            places.enter(entry, 4)
            for _ in range(4):
                await generated(entry)
        assert (places.open, places.behind, places.free) == (0, 8, 2)
        places.leave(held[0])  # it is judged and put
        assert (places.behind, places.free) == (4, 6)
        places.enter(held[2], 4)
        await generated(held[2])
        assert places.behind == 5
        places.note_judged(held[2])  # its siblings are still generated: it waits for nobody's judge
        assert places.behind == 4

    play(scene)


def test_only_tasks_with_a_free_place_are_leased_and_no_more_groups_than_fit() -> None:
    engine, sessions = Places(lambda: 64, Signals()), Places(lambda: 16, Signals())
    places = AllPlaces(engine, {"agent": sessions}, {"math": 8, "agent": 4})
    assert places.with_room(["math", "agent"]) == (("math", "agent"), 4)
    sessions.enter(lease(1), 16)
    assert places.with_room(["math", "agent"]) == (("math",), 8)
    engine.enter(lease(2), 63)
    assert places.with_room(["math", "agent"]) == (("math",), 1)
    engine.enter(lease(3), 8)
    assert places.with_room(["math", "agent"]) == ((), 0)
    assert places.capacity == 80


def test_samples_that_are_given_up_wait_no_longer_and_count_no_longer() -> None:
    async def scene() -> None:
        samples = Play(2)
        held = lease(1, samples=5)
        samples.enter(held)
        await settle()
        assert (samples.places.taken, samples.places.open) == (2, 5)
        assert samples.places.give_up(held, 2) == 2
        await settle()
        assert (samples.places.taken, samples.places.open, held.open) == (2, 3, 3)
        await samples.end(1)
        assert samples.places.taken == 2, "the one that still waits has its turn"
        assert samples.places.give_up(held, 2) == 0
        samples.places.enter(held, 2)  # they are back
        assert samples.places.open == held.open == 4
        samples.places.leave(held)
        assert (samples.places.open, samples.places.behind) == (0, 0)

    play(scene)
