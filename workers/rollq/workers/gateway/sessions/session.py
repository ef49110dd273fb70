"""One session: the calls of one harness for one sample, from the first request to the reward.

Invariant: a request that repeats an earlier request, because its client lost the answer, gets that answer without new
sampling.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rollq.buffer.common.ending import cancel
from rollq.buffer.common.mappings import filled
from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.workers.agents.loops import Rollout, failed
from rollq.workers.agents.turns import ChatFormat
from rollq.workers.gateway.calls import Answer, Call, CallRefused, session_over
from rollq.workers.gateway.sessions.answering import Answering
from rollq.workers.gateway.sessions.call_nodes import Located
from rollq.workers.gateway.sessions.finished_sample import Chooser, finished_sample, leave_out
from rollq.workers.gateway.sessions.outcomes import Outcome, rewards_of_calls
from rollq.workers.gateway.sessions.repeated_calls import Caller, RepeatedCalls
from rollq.workers.gateway.sessions.trained_segments import token_rewards
from rollq.workers.judging.token_rewards import with_token_rewards

SETTLE_S: Final = 5.0
"""How long to wait for running calls when a session closes."""
PLACE_S: Final = 300.0
"""How long a call waits for its turn: less than clients wait for an answer."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session. `max_made_tokens` 0 means no limit. `repeat_s` is how long a call may run after its caller
    is lost.
    """

    max_calls: int = 256
    max_made_tokens: int = 0
    parallel_calls: int = 8
    repeat_s: float = 60.0


class Session:
    """The calls of one harness. All methods run on the event loop."""

    def __init__(
        self, rollout: Rollout, chat_format: ChatFormat, limits: SessionLimits, chosen: Chooser | None = None
    ) -> None:
        """`chosen` decides which calls are trained; by default all. Raises `CorruptFrame`, as `Answering` does.

        `used_s` is the time of the last call on the monotonic clock, None before the first call. `refused_outcomes`
        counts rewards and failures from callers without the right to set them.
        """
        self.closed = asyncio.Event()
        self.used_s: float | None = None
        self.outcome = Outcome()
        self.refused_outcomes = 0
        self.answering = Answering(rollout, chat_format)
        self._rollout = rollout
        self._limits = limits
        self._chosen = chosen
        self._calls = RepeatedCalls(limits.repeat_s, self.answering.tree.answered.is_answered)
        self._places = asyncio.Semaphore(limits.parallel_calls)
        self._running = self._unfinished = 0
        self._turns: Mapping[int, float] | None = None  # the rewards of calls, by their numbers

    def ask(self, call: Call, caller: Caller) -> "asyncio.Task[Answer]":
        """Ask for the answer to a call. Raises `CallRefused`, as awaiting the answer can.

        Several callers may wait for the same answer, so no caller may cancel it; `lose` notes that a caller has left.
        The answer is cancelled when the session stops, or when nobody waits for it.
        """
        self.used_s = time.monotonic()
        if self.is_over:
            raise session_over()
        return self._calls.ask(self.answering.tree.answered.locate(call), caller, self._begin)

    def lose(self) -> None:
        """Note that a caller may have lost its connection."""
        self._calls.note_lost()

    def close(self, outcome: Outcome) -> bool:
        """End the session with its program's outcome. The same outcome may be repeated. Returns False for a different
        or late outcome. Raises `CallRefused` if the rewards do not match the session's turns."""
        if self.closed.is_set():
            return self.outcome == outcome
        if outcome.turns is not None:
            self._turns = rewards_of_calls(outcome.turns, self._seen())
        self.outcome = outcome
        self.closed.set()
        return True

    def ended(self, made: Sample, *, out_of_time: bool) -> Sample:
        """The sample `made`, a failed one if the program reported a failure; its finish reason is `length` if it ran
        `out_of_time`."""
        if self.outcome.failure is not None:
            kind, reason = self.outcome.failure
            return replace(failed(reason, kind), extra=made.extra)
        return replace(made, finish_reason=FinishReason.LENGTH) if out_of_time and made.segments else made

    @property
    def is_over(self) -> bool:
        """Whether the session is closed or its group is being stopped."""
        return self.closed.is_set() or self._rollout.is_stopped()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way or waits for its turn."""
        return self._running > 0

    def _begin(self, located: Located, times: int) -> "asyncio.Task[Answer]":
        if len(self.answering.tree.answered.nodes) + self._running >= self._limits.max_calls:
            raise CallRefused(f"this session has made its {self._limits.max_calls} calls", code="too_many_calls")
        answering = asyncio.create_task(self._answer(located, times))
        answering.add_done_callback(self._ended)
        self._running += 1
        return answering

    async def _answer(self, located: Located, times: int) -> Answer:
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
            made = sum(node.tokens for node in self.answering.tree.answered.nodes)
            if 0 < self._limits.max_made_tokens <= made:
                raise CallRefused(
                    f"this session has made {made} tokens, the most that it may make", code="too_many_tokens"
                )
            return await self.answering.answer(located, times)
        finally:
            self._places.release()

    def _ended(self, _: "asyncio.Task[Answer]") -> None:
        self._running -= 1
        if self.answering.failure is not None:
            self.closed.set()

    async def settle(self) -> None:
        """Wait a while for running calls, then stop them. Does neither if the group is stopped or the engine died."""
        self.closed.set()
        if self.answering.failure is not None or self._rollout.is_stopped():
            return
        running = [asked.task for asked in self._calls if not asked.task.done()]
        if running:
            await asyncio.wait(running, timeout=SETTLE_S)
        self._unfinished += sum(not answering.done() for answering in running)
        await self.stop()

    async def stop(self) -> None:
        """Stop all running calls."""
        self.closed.set()
        await cancel([asked.task for asked in self._calls])

    def stopped_sample(self) -> Sample | None:
        """The calls so far, for the next attempt, if the group is being stopped. Raises `EngineDead`."""
        if self.answering.failure is not None:
            raise self.answering.failure
        return self.answering.so_far() if self._rollout.is_stopped() else None

    def sample(self, *, extra: Mapping[str, Any]) -> Sample:
        """The finished sample: the segments of all calls that are trained."""
        answering, nodes = self.answering, self.answering.tree.answered.nodes
        leave_out(nodes, self._seen(), self._chosen)
        counts = {
            "replayed_calls": answering.replayed,
            "dropped_records": answering.recorded - answering.replayed,
            "unfinished_calls": self._unfinished,
            "forced_tool_choices": answering.forced,
            "guided_calls": answering.guided,
            "refused_outcomes": self.refused_outcomes,
        }
        given = {"program": dict(self.outcome.extra), **counts, "ignored": dict(answering.ignored)}
        facts = {**extra, **filled(given)}
        made = finished_sample(nodes, self._rollout, facts)
        if self._turns is not None and made.segments and not self._rollout.evaluation:
            made = with_token_rewards(made, token_rewards(nodes, self._turns))
        if self.outcome.truncated and made.segments:
            made = replace(made, finish_reason=FinishReason.LENGTH)
        reward, parts = self.outcome.reward, dict(self.outcome.parts)
        return replace(made, reward=reward, reward_parts=parts, tools=tuple(answering.tools))

    def _seen(self) -> set[int]:
        """The numbers of the calls whose answer a client has."""
        return {asked.task.result().number for asked in self._calls if asked.is_seen}
