"""One session: the calls of one harness for one sample, from its first request to its reward.

Invariant: a request that repeats an earlier one, because its client has lost the answer, gets that answer, and nothing
is sampled for it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from rollq.buffer.values.rollouts import Sample
from rollq.workers.agents.loops import Rollout
from rollq.workers.agents.turns import ChatFormat
from rollq.workers.gateway.calls import Answer, Call, CallRefused
from rollq.workers.gateway.sessions.answering import Answering, session_over
from rollq.workers.gateway.sessions.call_nodes import Located
from rollq.workers.gateway.sessions.finished_sample import Chooser, finished_sample, leave_out

SETTLE_S: Final = 5.0
"""How long calls that run when a session closes are awaited."""
PLACE_S: Final = 300.0
"""How long a call waits for its turn, less than clients wait for an answer."""
RETURN_S: Final = 60.0
"""How long a client is expected back that was turned away."""


class Caller(Protocol):
    """The connection that waits for an answer."""

    @property
    def is_lost(self) -> bool:
        """Whether it was lost before the last byte of the answer was sent."""
        ...

    @property
    def is_served(self) -> bool:
        """Whether the last byte of the answer was sent."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session. `max_made_tokens` 0: no limit. `repeat_s`: how long a call may run whose caller is lost."""

    max_calls: int = 256
    max_made_tokens: int = 0
    parallel_calls: int = 8
    repeat_s: float = 60.0


@dataclass(slots=True, eq=False)
class Asked:
    """A call that was asked for at the count `begun`, once or more often, and its answer. `giving_up` stops it after a
    while, since nobody waits for it any more."""

    task: "asyncio.Task[Answer]"
    begun: int
    callers: list[Caller] = field(default_factory=list)
    number: int | None = None
    giving_up: asyncio.TimerHandle | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer, and nobody has it."""
        return all(caller.is_lost for caller in self.callers)

    @property
    def is_seen(self) -> bool:
        """Whether somebody has the answer."""
        return any(caller.is_served for caller in self.callers)


class Session:
    """The calls of one harness. All methods run on the event loop."""

    def __init__(
        self,
        rollout: Rollout,
        chat_format: ChatFormat,
        limits: SessionLimits,
        chosen: Chooser | None = None,
    ) -> None:
        """`chosen` says which calls are trained; by default all are. Raises `CorruptFrame`, as `Answering` does."""
        self.closed = asyncio.Event()
        self.used_s = time.monotonic()
        self.reward: float | None = None
        self.reward_parts: Mapping[str, float] = {}
        self.answering = Answering(rollout, chat_format)
        self._rollout = rollout
        self._limits = limits
        self._chosen = chosen
        self._asked: dict[bytes, list[Asked]] = {}
        self._times: Counter[bytes] = Counter()  # how often each request was asked
        self._turned_away: dict[bytes, list[float]] = {}  # how long clients are expected back, by their requests
        self._places = asyncio.Semaphore(limits.parallel_calls)
        self._running = self._unfinished = 0

    def ask(self, call: Call, caller: Caller) -> "asyncio.Task[Answer]":
        """Ask for the answer to a call. Raises `CallRefused`, and so does the answer.

        Several callers may wait for the same one, so none of them may cancel it; `lose` notes that a caller has left.
        It is cancelled when the session stops, or nobody waits for it any more.
        """
        self.used_s = time.monotonic()
        if self.is_over:
            raise session_over()
        located = self.answering.locate(call)
        asked = self._repeated(located)
        if asked is None:
            asked = self._begin(located)
        asked.callers.append(caller)
        if asked.giving_up is not None:
            asked.giving_up.cancel()
            asked.giving_up = None
        return asked.task

    def lose(self) -> None:
        """Note that a caller may have lost its connection."""
        for known in self._asked.values():
            for asked in known:
                self._note_lost(asked)

    def close(self, reward: float | None, parts: Mapping[str, float]) -> bool:
        """End the session with the reward that the harness knows, or None: then the task's judge finds one. The same
        may come again; False for another reward, or one that comes too late."""
        if self.closed.is_set():
            return self.reward == reward and self.reward_parts == parts
        self.reward, self.reward_parts = reward, parts
        self.closed.set()
        return True

    @property
    def is_over(self) -> bool:
        """Whether it is closed, or its group is being stopped."""
        return self.closed.is_set() or self._rollout.is_stopped()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, or waits for its turn."""
        return self._running > 0

    def _repeated(self, located: Located) -> Asked | None:
        """The earlier call that this one repeats: its client says so, or has lost its connection."""
        known = [asked for asked in self._asked.get(located.digest, ()) if not asked.task.cancelling()]
        for asked in reversed(known):
            if asked.is_abandoned:
                return asked
        if self._comes_back(located.digest) or not located.call.repeats:
            return None
        candidates = [asked for asked in known if not asked.is_seen] or known
        return candidates[-1] if candidates else None

    def _note_lost(self, asked: Asked) -> None:
        """Stop a call, after a while, that nobody waits for any more."""
        if asked.is_abandoned and asked.giving_up is None and not asked.task.done():
            asked.giving_up = asyncio.get_running_loop().call_later(self._limits.repeat_s, self._give_up, asked)

    def _give_up(self, asked: Asked) -> None:
        """Stop a call that has no answer yet. One that is being recorded has one, for the caller that asks next."""
        if not any(node.begun == asked.begun for node in self.answering.tree.nodes):
            asked.task.cancel()

    def _turn_away(self, digest: bytes, clients: int = 1) -> None:
        """Expect clients back that are turned away."""
        until_s = time.monotonic() + RETURN_S
        self._turned_away.setdefault(digest, []).extend([until_s] * clients)

    def _comes_back(self, digest: bytes) -> bool:
        """Whether a request is that of a client that was turned away, which is then expected no more."""
        now_s = time.monotonic()
        expected = [until_s for until_s in self._turned_away.pop(digest, ()) if until_s > now_s]
        if expected[1:]:
            self._turned_away[digest] = expected[1:]
        return bool(expected)

    def _begin(self, located: Located) -> Asked:
        if len(self.answering.tree.nodes) + self._running >= self._limits.max_calls:
            raise CallRefused(f"this session has made its {self._limits.max_calls} calls", code="too_many_calls")
        known = self._asked.setdefault(located.digest, [])
        begun = self.answering.tree.tick()
        asked = Asked(asyncio.create_task(self._answer(located, self._times[located.digest], begun)), begun)
        self._times[located.digest] += 1
        known.append(asked)
        asked.task.add_done_callback(lambda _: self._answered(located.digest, asked))
        self._running += 1
        return asked

    async def _answer(self, located: Located, times: int, begun: int) -> Answer:
        """The answer to a call, once fewer than `parallel_calls` others run. Raises `CallRefused`."""
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
        try:
            if self.is_over:
                raise session_over()
            made = sum(node.tokens for node in self.answering.tree.nodes)
            if 0 < self._limits.max_made_tokens <= made:
                raise CallRefused(f"this session has made {made} tokens, the most that it may", code="too_many_tokens")
            return await self.answering.answer(located, times, begun)
        finally:
            self._places.release()

    def _answered(self, digest: bytes, asked: Asked) -> None:
        self._running -= 1
        if asked.task.cancelled() or asked.task.exception() is not None:
            self._asked[digest].remove(asked)
            error = None if asked.task.cancelled() else asked.task.exception()
            if isinstance(error, CallRefused) and error.retry_after_s:
                self._turn_away(digest, sum(not caller.is_lost for caller in asked.callers))
            if self.answering.failure is not None:
                self.closed.set()
        else:
            asked.number = asked.task.result().number

    async def settle(self) -> None:
        """Wait a while for calls that still run, then stop them."""
        self.closed.set()
        running = [asked.task for known in self._asked.values() for asked in known if not asked.task.done()]
        if running:
            await asyncio.wait(running, timeout=SETTLE_S)
        self._unfinished += sum(not answering.done() for answering in running)
        await self.stop()

    async def stop(self) -> None:
        """Stop all calls that still run."""
        self.closed.set()
        running = [asked.task for known in self._asked.values() for asked in known if not asked.task.done()]
        for answering in running:
            answering.cancel()
        if running:
            await asyncio.wait(running)

    def so_far(self) -> Sample:
        """The calls so far, for the next attempt."""
        return self.answering.so_far()

    def sample(self, *, extra: Mapping[str, Any]) -> Sample:
        """The finished sample: the segments of all calls that are trained."""
        answering = self.answering
        seen = {asked.number for known in self._asked.values() for asked in known if asked.is_seen}
        leave_out(answering.tree, {number for number in seen if number is not None}, self._chosen)
        counts = {
            "replayed_calls": answering.replayed,
            "dropped_records": answering.recorded - answering.replayed,
            "unfinished_calls": self._unfinished,
            "forced_tool_choices": answering.forced,
            "guided_calls": answering.guided,
        }
        ignored = {"ignored": dict(answering.ignored)} if answering.ignored else {}
        facts = {**extra, **{name: count for name, count in counts.items() if count}, **ignored}
        made = finished_sample(answering.tree, self._rollout, facts)
        return replace(made, reward=self.reward, reward_parts=dict(self.reward_parts), tools=tuple(answering.tools))
