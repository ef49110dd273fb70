"""Matches sessions that wait for programs elsewhere with programs' calls that wait for a session.

Invariant: a session is given to one call, and only while its client is connected. Tasks take turns; within a task, the
oldest session comes first.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.sessions.outcomes import Outcome

MOST_WAIT_S: Final = 30.0
RETRY_S: Final = 2
"""A program should ask for a session again after this many seconds."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Offer:
    """A task's session, and the `facts` for the program that takes it. `is_over` returns whether the session has ended,
    `close` ends the session, and `taken` is set once a program has it."""

    task: str
    facts: Mapping[str, Any]
    is_over: Callable[[], bool]
    close: Callable[[Outcome], object]
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A call that waits for a session of `tasks`, or of any task if None. The call gets None when waiting ends."""

    tasks: Collection[str] | None
    is_lost: Callable[[], bool]
    given: "asyncio.Future[Offer | None]"

    def wants(self, task: str) -> bool:
        """Whether the call still waits and takes sessions of this task."""
        return not self.given.done() and not self.is_lost() and (self.tasks is None or task in self.tasks)


class Wanted(NamedTuple):
    """A request for a session of `tasks`, or of any task if None. It may wait for `wait_s`."""

    tasks: Collection[str] | None = None
    wait_s: float = 0.0


def wanted(body: Mapping[str, Any], known: Set[str]) -> Wanted:
    """Parse the request for a session in this JSON body. `known` holds the tasks whose sessions are offered here, and
    is empty if unknown. Raises `CallRefused`, including when all requested tasks are unknown.
    """
    tasks, wait_s = _tasks(body.get("tasks")), body.get("wait_s", 0)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MOST_WAIT_S:
        raise CallRefused(f"wait_s must be a number of seconds from 0 to {MOST_WAIT_S:g}")
    if tasks is not None and known and known.isdisjoint(tasks):
        raise CallRefused(
            f"this worker has none of these tasks: {', '.join(tasks)}; its tasks for programs elsewhere: "
            f"{', '.join(sorted(known))}",
            code="unknown_task",
        )
    return Wanted(tasks, float(wait_s))


def _tasks(tasks: Any) -> tuple[str, ...] | None:
    if tasks is None:
        return None
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise CallRefused("tasks must be a list of names of tasks")
    return tuple(tasks)


class Offers:
    """The offered sessions, by task. All methods run on the event loop."""

    def __init__(self) -> None:
        self.is_ending = False
        self._by_task: dict[str, deque[Offer]] = {}  # the task whose turn is next comes first
        self._waiting: list[Waiting] = []

    @contextmanager
    def offering(self, offer: Offer) -> Iterator[None]:
        """Offer a session."""
        self._by_task.setdefault(offer.task, deque()).append(offer)
        self._give(offer)
        try:
            yield
        finally:
            self._remove(offer)

    async def take(self, tasks: Collection[str] | None, wait_s: float, is_lost: Callable[[], bool]) -> Offer | None:
        """Return the next session of `tasks`, or of any task if None, after waiting up to `wait_s`; None if there is no
        session.

        A caller that cannot pass the session to its client must return it with `put_back`.
        """
        offer = self._next(tasks)
        if offer is not None or not wait_s or self.is_ending:
            return offer
        waiting = Waiting(tasks, is_lost, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting.given], timeout=wait_s)
            return waiting.given.result() if waiting.given.done() else None
        except asyncio.CancelledError:
            if waiting.given.done() and (offer := waiting.given.result()) is not None:
                self.put_back(offer)
            raise
        finally:
            self._waiting.remove(waiting)

    def none_left(self) -> CallRefused:
        """The refusal of a call that gets no session."""
        if self.is_ending:
            return CallRefused("this worker is stopping", status=429, code="stopping", retry_after_s=RETRY_S)
        return CallRefused("no session waits for a harness", status=429, code="no_session", retry_after_s=RETRY_S)

    def put_back(self, offer: Offer) -> None:
        """Offer a session again because the caller did not get it."""
        if not offer.is_over():
            self._by_task.setdefault(offer.task, deque()).appendleft(offer)
            self._give(offer)

    def close_all(self, outcome: Outcome) -> None:
        """End all sessions that no program has taken."""
        for offer in [offer for offers in self._by_task.values() for offer in offers]:
            offer.close(outcome)

    def end_waits(self) -> None:
        """End all waits for sessions, and from now on let no call wait."""
        self.is_ending = True
        for waiting in self._waiting:
            if not waiting.given.done():
                waiting.given.set_result(None)

    def _next(self, tasks: Collection[str] | None) -> Offer | None:
        for task, offers in self._by_task.items():
            if tasks is None or task in tasks:
                offer = next((offer for offer in offers if not offer.is_over()), None)
                if offer is not None:
                    self._remove(offer)
                    if task in self._by_task:
                        self._by_task[task] = self._by_task.pop(task)  # the other tasks come first now
                    return offer
        return None

    def _give(self, offer: Offer) -> None:
        """Give an offered session to the call that has waited longest for this task."""
        waiting = next((waiting for waiting in self._waiting if waiting.wants(offer.task)), None)
        if waiting is not None and not offer.is_over():
            self._remove(offer)
            waiting.given.set_result(offer)

    def _remove(self, offer: Offer) -> None:
        offers = self._by_task.get(offer.task, deque())
        if offer in offers:
            offers.remove(offer)
        if not offers:
            self._by_task.pop(offer.task, None)


class Taker:
    """A program, or all programs that share a key. They take sessions from `offers`."""

    def __init__(self, offers: Offers) -> None:
        """`has_asked` is true once the program has asked for a session."""
        self.offers = offers
        self.has_asked = False
        self._taken: WeakSet[Offer] = WeakSet()  # an offer lives as long as its session

    def take(self, offer: Offer) -> None:
        """Note that the program has taken a session."""
        offer.taken.set()
        self._taken.add(offer)

    def fail(self, outcome: Outcome) -> None:
        """End all sessions of the program, which has died."""
        for offer in list(self._taken):
            if not offer.is_over():
                offer.close(outcome)
