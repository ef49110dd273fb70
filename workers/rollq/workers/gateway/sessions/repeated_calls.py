"""Recognises requests that repeat an earlier request of the session because their client has no answer to it.

| a client | gets |
|---|---|
| lost its connection, and asks the same | its earlier call, which still runs or has its answer |
| says that it repeats a request | the newest call of that request whose answer nobody has seen, else the newest |
| was turned away, and says that it repeats the request | a new call: the refused call made no answer |
| asks the same while others wait for it, or have it | a new call |
| leaves, and nobody else waits | nothing: its call stops after `repeat_s`, unless it has its answer by then |
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from rollq.workers.gateway.calls import Answer, CallRefused
from rollq.workers.gateway.sessions.call_nodes import Located

RETURN_S: Final = 60.0
"""A client that was turned away is expected back within this time."""


class Caller(Protocol):
    """The connection that waits for an answer."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost before the last byte of the answer was sent."""

    @property
    def is_served(self) -> bool:
        """Whether the last byte of the answer was sent."""


@dataclass(slots=True, eq=False)
class Asked:
    """A call that was located at the count `begun`, was asked once or several times, and its answer. `giving_up` is the
    timer that stops it when nobody waits for it."""

    task: "asyncio.Task[Answer]"
    begun: int
    callers: list[Caller] = field(default_factory=list)
    giving_up: asyncio.TimerHandle | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer, and nobody has it."""
        return all(caller.is_lost for caller in self.callers)

    @property
    def is_seen(self) -> bool:
        """Whether somebody has the answer."""
        return any(caller.is_served for caller in self.callers)

    def wait(self, caller: Caller) -> None:
        """Add a caller that waits for the answer."""
        self.callers.append(caller)
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None


class RepeatedCalls:
    """The calls of a session by the digests of their requests. All methods run on the event loop."""

    def __init__(self, repeat_s: float, is_answered: Callable[[int], bool]) -> None:
        """`repeat_s` limits how long a call may run while nobody waits for it. `is_answered` returns whether the call
        that was located at this count has an answer."""
        self._repeat_s = repeat_s
        self._is_answered = is_answered
        self._asked: dict[bytes, list[Asked]] = {}
        self._times: Counter[bytes] = Counter()  # how often each request was sent
        self._turned_away: dict[bytes, list[float]] = {}  # the deadline for clients to come back, by request

    def __iter__(self) -> Iterator[Asked]:
        return (asked for calls in self._asked.values() for asked in calls)

    def ask(
        self, located: Located, caller: Caller, begin: "Callable[[Located, int], asyncio.Task[Answer]]"
    ) -> "asyncio.Task[Answer]":
        """The answer that a caller waits for: of the earlier call that its call repeats, or of a new one.

        `begin` starts a new call, with the number of equal calls before it; its exceptions are raised. A call that ends
        without an answer is forgotten, and its waiting callers may be expected back.
        """
        digest = located.digest
        asked = self._repeated(digest, located.call.repeats)
        if asked is None:
            asked = Asked(begin(located, self._times[digest]), located.begun)
            self._times[digest] += 1
            self._asked.setdefault(digest, []).append(asked)
            asked.task.add_done_callback(partial(self._ended, digest, asked))
        asked.wait(caller)
        return asked.task

    def _repeated(self, digest: bytes, repeats: int) -> Asked | None:
        """The earlier call that a request repeats. `repeats` is how often the client says it has sent the request
        before.
        """
        calls = [asked for asked in self._asked.get(digest, ()) if not asked.task.cancelling()]
        abandoned = [asked for asked in calls if asked.is_abandoned]
        if abandoned:  # even without the header, which some clients do not send
            return abandoned[-1]
        if self._comes_back(digest) or not repeats:
            return None
        candidates = [asked for asked in calls if not asked.is_seen] or calls
        return candidates[-1] if candidates else None

    def note_lost(self) -> None:
        """Stop, after a while, calls that nobody waits for."""
        for asked in self:
            if asked.is_abandoned and asked.giving_up is None and not asked.task.done():
                asked.giving_up = asyncio.get_running_loop().call_later(self._repeat_s, self._give_up, asked)

    def _give_up(self, asked: Asked) -> None:
        if not self._is_answered(asked.begun):  # a call that is being recorded has an answer for the next caller
            asked.task.cancel()

    def _ended(self, digest: bytes, asked: Asked, task: "asyncio.Task[Answer]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._asked[digest].remove(asked)
        if isinstance(error, CallRefused) and error.retry_after_s:
            until_s = time.monotonic() + RETURN_S
            waiting = sum(not caller.is_lost for caller in asked.callers)
            self._turned_away.setdefault(digest, []).extend([until_s] * waiting)

    def _comes_back(self, digest: bytes) -> bool:
        """Whether a request is from a client that was turned away. That client is then no longer expected."""
        now_s = time.monotonic()
        expected = [until_s for until_s in self._turned_away.pop(digest, ()) if until_s > now_s]
        if expected[1:]:
            self._turned_away[digest] = expected[1:]
        return bool(expected)
