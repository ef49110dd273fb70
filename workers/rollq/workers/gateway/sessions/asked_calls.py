"""A session's calls. Each is answered, unless it repeats an earlier call or exceeds the session's limits. A call
repeats an earlier call whose answer its client does not have:

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from rollq.workers.gateway.calls import Answer, Call, CallRefused, session_over
from rollq.workers.gateway.sessions.answering import Answering
from rollq.workers.gateway.sessions.call_nodes import Located
from rollq.workers.gateway.sessions.call_tree import CallTree

PLACE_S: Final = 300.0
"""How many seconds a call waits for its turn: fewer than clients wait for an answer."""
RETURN_S: Final = 60.0
"""A client that was turned away is expected back within this many seconds."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """A session's limits. `max_made_tokens` 0 means no limit. `repeat_s` is how many seconds a call may run after its
    caller is lost.
    """

    max_calls: int = 256
    max_made_tokens: int = 0
    parallel_calls: int = 8
    repeat_s: float = 60.0


class Caller(Protocol):
    """The connection that waits for an answer."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost before the answer's last byte was sent."""

    @property
    def is_served(self) -> bool:
        """Whether the answer's last byte was sent."""


@dataclass(slots=True, eq=False)
class Asked:
    """A call with this `digest`, located at the count `begun` and asked once or several times, and its answer.
    `giving_up` is the timer that stops the call when nobody waits for the answer."""

    task: "asyncio.Task[Answer]"
    digest: bytes
    begun: int
    callers: list[Caller] = field(default_factory=list)
    giving_up: asyncio.TimerHandle | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer, and nobody has it."""
        return all(caller.is_lost for caller in self.callers)

    @property
    def is_seen(self) -> bool:
        """Whether a client has the answer."""
        return any(caller.is_served for caller in self.callers)

    def wait(self, caller: Caller) -> None:
        """Add a caller that waits for the answer."""
        self.callers.append(caller)
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None


class AskedCalls:
    """A session's calls, by their requests' digests. All methods run on the event loop. `used_s` is the last call's
    time on the monotonic clock, None before the first call."""

    def __init__(self, tree: CallTree, answering: Answering, limits: SessionLimits, closed: asyncio.Event) -> None:
        """`closed` is set when the session ends. A call sets it if the session cannot continue."""
        self.used_s: float | None = None
        self._tree = tree
        self._answering = answering
        self._limits = limits
        self._closed = closed
        self._places = asyncio.Semaphore(limits.parallel_calls)
        self._running = 0
        self._asked: dict[bytes, list[Asked]] = {}
        self._times: Counter[bytes] = Counter()  # how often each request was sent
        self._turned_away: dict[bytes, list[float]] = {}  # the deadline for clients to come back, by request

    def __iter__(self) -> Iterator[Asked]:
        return (asked for calls in self._asked.values() for asked in calls)

    @property
    def is_over(self) -> bool:
        """Whether the session is closed or its group is being stopped."""
        return self._closed.is_set() or self._answering.rollout.is_stopped()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way or waits for its turn."""
        return self._running > 0

    def ask(self, call: Call, caller: Caller) -> "asyncio.Task[Answer]":
        """Return the answer that a caller waits for, from the earlier call that this call repeats, or from a new one.
        Raises `CallRefused`, and so may awaiting the answer. A refused call counts as a use of the session.

        Several callers may wait for the same answer, so no caller may cancel it; `note_lost` notes that a caller has
        left. The answer is cancelled when the session stops, or when nobody waits for it.
        """
        self.used_s = time.monotonic()
        if self.is_over:
            raise session_over()
        located = self._tree.answered.locate(call)
        asked = self._repeated(located.digest, call.repeats) or self._begin(located)
        asked.wait(caller)
        return asked.task

    def _begin(self, located: Located) -> Asked:
        """Begin a new call. If the call ends without an answer, it is forgotten, and its waiting callers may be
        expected back."""
        if len(self._tree.answered.nodes) + self._running >= self._limits.max_calls:
            raise CallRefused(f"this session has made its {self._limits.max_calls} calls", code="too_many_calls")
        digest = located.digest
        asked = Asked(asyncio.create_task(self._answer(located, self._times[digest])), digest, located.begun)
        self._times[digest] += 1
        self._asked.setdefault(digest, []).append(asked)
        self._running += 1
        asked.task.add_done_callback(partial(self._ended, asked))
        return asked

    async def _answer(self, located: Located, times: int) -> Answer:
        """The answer to a call, once fewer than `parallel_calls` others run. Raises `CallRefused`."""
        await self._take_place()
        try:
            if self.is_over:
                raise session_over()
            made, most = self._answering.made_tokens, self._limits.max_made_tokens
            if 0 < most <= made:
                raise CallRefused(
                    f"this session has made {made} tokens, the most that it may make", code="too_many_tokens"
                )
            return await self._answering.answer(await self._tree.place(located), times)
        finally:
            self._places.release()

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(PLACE_S):
                await self._places.acquire()
        except TimeoutError:
            most = self._limits.parallel_calls
            raise CallRefused(
                f"the call has waited {PLACE_S:g} s for one of the {most} that this session runs at a time "
                "(parallel_calls)",
                status=429,
                code="rate_limit",
                retry_after_s=1,
            ) from None

    def _repeated(self, digest: bytes, repeats: int) -> Asked | None:
        """The earlier call that a request repeats, if any. `repeats` counts how often the client says it has sent the
        request before.
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
                asked.giving_up = asyncio.get_running_loop().call_later(self._limits.repeat_s, self._give_up, asked)

    def _give_up(self, asked: Asked) -> None:
        if not self._answering.is_recording(asked.begun):  # otherwise it has an answer for the next caller
            asked.task.cancel()

    def _ended(self, asked: Asked, task: "asyncio.Task[Answer]") -> None:
        self._running -= 1
        if self._answering.failure is not None:
            self._closed.set()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._asked[asked.digest].remove(asked)
        if isinstance(error, CallRefused) and error.retry_after_s:
            until_s = time.monotonic() + RETURN_S
            waiting = sum(not caller.is_lost for caller in asked.callers)
            self._turned_away.setdefault(asked.digest, []).extend([until_s] * waiting)

    def _comes_back(self, digest: bytes) -> bool:
        """Whether a request is from a client that was turned away. That client is then no longer expected."""
        now_s = time.monotonic()
        expected = [until_s for until_s in self._turned_away.pop(digest, ()) if until_s > now_s]
        if expected[1:]:
            self._turned_away[digest] = expected[1:]
        return bool(expected)
