"""Places for samples in a worker limit how many samples are generated at the same time. The best waiting sample gets
the next place.

Invariant: a sample is generated only while it has a place. A freed place immediately goes to the next sample. Groups
are leased only while a place is free, so a worker can start every group that it holds; waiting groups stay in the
buffer for a worker with a place.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.sample_order import Turn, turn_of
from rollq.workers.wake_signals import Signals

JUDGED_SHARE = 4
"""One extra sample per four places may be with its judge. More samples would only grow stale."""


class Places:
    """One kind of places, with the samples that have a place and the samples that wait for one.

    A sample is open from its group's lease until it has been generated. Then it is behind until it has been judged, or
    until its group's lease ends if no siblings are open.
    """

    def __init__(self, capacity: Callable[[], int], signals: Signals) -> None:
        """`capacity` returns the current number of places."""
        self.open = self.taken = self.behind = 0
        self._capacity = capacity
        self._signals = signals
        self._staying: set[asyncio.Future[bool]] = set()
        self._waiting: dict[HeldLease, deque[asyncio.Future[bool]]] = {}

    @property
    def capacity(self) -> int:
        """The number of samples that may be generated at the same time."""
        return self._capacity()

    @property
    def free(self) -> int:
        """The number of further samples that can get a place now, which is smaller while judges are slow."""
        capacity = self.capacity
        return min(capacity - self.open, capacity + -(-capacity // JUDGED_SHARE) - self.open - self.behind)

    def enter(self, held: HeldLease, samples: int) -> None:
        """Expect this many samples of a new lease, or this many of an old lease that other workers left unfinished."""
        held.open += samples
        self.open += samples

    def leave(self, held: HeldLease) -> None:
        """Stop expecting samples of a lease that has ended."""
        self.open -= held.open
        self.behind -= held.behind
        held.open = held.behind = 0
        self.look()

    @asynccontextmanager
    async def place(self, held: HeldLease, *, stays: bool = False) -> AsyncIterator[bool]:
        """Hold a place for one sample of a lease, after waiting for its turn. Yields False if the sample was given up
        first.

        A sample that `stays` is never given up.
        """
        if not await self._take(held, stays=stays):
            self.skip(held)
            yield False
            return
        try:
            yield True
        finally:
            self.taken -= 1
            if held.open:  # otherwise the lease has ended
                self.skip(held)
                held.behind += 1
                self.behind += 1
            self.look()

    def skip(self, held: HeldLease) -> None:
        """Expect one sample fewer from a lease."""
        if held.open:
            held.open -= 1
            self.open -= 1

    def give_up(self, held: HeldLease, samples: int) -> int:
        """Remove up to this many waiting samples of a lease from the queue. Returns how many were removed."""
        turns = self._waiting.get(held, deque())
        leaving = [turn for turn in turns if not turn.done() and turn not in self._staying]
        leaving = leaving[-samples:] if samples > 0 else []
        for turn in leaving:
            turns.remove(turn)
            turn.set_result(False)
        if not turns:
            self._waiting.pop(held, None)
        return len(leaving)

    def note_judged(self, held: HeldLease) -> None:
        """Note that a sample has been judged."""
        if held.open:
            self.note_lent(held)

    def note_lent(self, held: HeldLease) -> None:
        """Note that a sample that has had a place is given to another worker."""
        if held.behind:
            held.behind -= 1
            self.behind -= 1
            self.look()

    async def _take(self, held: HeldLease, *, stays: bool) -> bool:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if stays:
            self._staying.add(turn)
            turn.add_done_callback(self._staying.discard)
        self._waiting.setdefault(held, deque()).append(turn)
        self.look()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():  # the place arrived at the same moment
                self.taken -= 1
            self.look()  # drops cancelled turns
            raise

    def look(self) -> None:
        """Give free places to the next samples. If more samples can get a place, a new group may be leased.

        A stopped group's samples stop waiting, and end immediately.
        """
        self._release_finished()
        while self._waiting and self.taken < self.capacity:
            held = min(self._waiting, key=_turn)
            turns = self._waiting[held]
            turn = turns.popleft()
            if not turns:
                del self._waiting[held]
            self._grant(held, turn)
        if self.free > 0:
            self._signals.room.set()

    def _release_finished(self) -> None:
        for held in [held for held in self._waiting if held.finished]:
            for turn in self._waiting.pop(held):
                self._grant(held, turn)

    def _grant(self, held: HeldLease, turn: "asyncio.Future[bool]") -> None:
        if not turn.done():
            self.taken += 1
            held.placed = True
            turn.set_result(True)


def _turn(held: HeldLease) -> Turn:
    return turn_of(held.lease, placed=held.placed, expected_tokens=held.expected_tokens)


class AllPlaces:
    """A worker's places: the engine's, and a separate kind for each agent loop that limits its sessions.

    A session takes none of the engine's places, since it does not always use the engine.
    """

    def __init__(self, engine: Places, sessions: Mapping[str, Places], group_sizes: Mapping[str, int]) -> None:
        """`sessions` holds the session places by task. `group_sizes` has the number of samples in each task's
        groups."""
        self.engine = engine
        self._sessions = sessions
        self._group_sizes = group_sizes
        self._every = {id(places): places for places in map(self.of, group_sizes)}.values()

    def of(self, task: str) -> Places:
        """The places of a task's samples."""
        return self._sessions.get(task, self.engine)

    def group_size(self, task: str) -> int:
        """The number of samples in a task's groups."""
        return self._group_sizes[task]

    def with_room(self, tasks: Collection[str]) -> tuple[tuple[str, ...], int]:
        """The subset of `tasks` that may lease a group, and the number of groups to lease from these tasks."""
        open_tasks = tuple(task for task in tasks if self.of(task).free > 0)
        groups = (-(-self.of(task).free // self._group_sizes[task]) for task in open_tasks)
        return open_tasks, min(groups, default=0)

    @property
    def open(self) -> int:
        """The number of samples still to be generated."""
        return sum(places.open for places in self._every)

    @property
    def taken(self) -> int:
        """The number of samples with a place."""
        return sum(places.taken for places in self._every)

    @property
    def capacity(self) -> int:
        """The number of samples that may have a place, over the kinds of places that tasks use."""
        return sum(places.capacity for places in self._every)
