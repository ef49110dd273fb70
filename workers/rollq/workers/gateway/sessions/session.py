"""One session: one harness's calls for one sample, from the first request to the reward.

Invariant: if a client loses an answer and repeats its request, it gets that answer without new sampling.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from rollq.buffer.common.ending import cancel
from rollq.buffer.common.mappings import filled
from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.workers.agents.loops import Rollout, failed
from rollq.workers.agents.turns import ChatFormat
from rollq.workers.gateway.sessions.answering import Answering
from rollq.workers.gateway.sessions.asked_calls import AskedCalls, SessionLimits
from rollq.workers.gateway.sessions.call_tree import CallTree
from rollq.workers.gateway.sessions.finished_sample import Chooser, finished_sample, leave_out
from rollq.workers.gateway.sessions.outcomes import Outcome, rewards_of_calls
from rollq.workers.gateway.sessions.trained_segments import token_rewards
from rollq.workers.judging.token_rewards import with_token_rewards

SETTLE_S: Final = 5.0
"""How many seconds to wait for running calls when a session closes."""


class Session:
    """One harness's calls. All methods run on the event loop."""

    def __init__(
        self, rollout: Rollout, chat_format: ChatFormat, limits: SessionLimits, chosen: Chooser | None = None
    ) -> None:
        """`chosen` decides which calls are trained; by default, all are. Raises `CorruptFrame`, as `Answering` does.

        `refused_outcomes` counts rewards and failures from callers that may not set them.
        """
        self.closed = asyncio.Event()
        self.outcome = Outcome()
        self.refused_outcomes = 0
        self.tree = CallTree(rollout)
        self.answering = Answering(rollout, chat_format, self.tree)
        self.calls = AskedCalls(self.tree, self.answering, limits, self.closed)
        self._rollout = rollout
        self._chosen = chosen
        self._unfinished = 0
        self._turns: Mapping[int, float] | None = None  # the rewards of calls, by their numbers

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
        """The sample `made`, or a failed sample if the program reported a failure. The finish reason is `length` if the
        sample ran `out_of_time`."""
        if self.outcome.failure is not None:
            kind, reason = self.outcome.failure
            return replace(failed(reason, kind), extra=made.extra)
        return replace(made, finish_reason=FinishReason.LENGTH) if out_of_time and made.segments else made

    async def settle(self) -> None:
        """Wait up to `SETTLE_S` for running calls, then stop them. Do neither if the group is stopped or the engine
        died."""
        self.closed.set()
        if self.answering.failure is not None or self._rollout.is_stopped():
            return
        running = [asked.task for asked in self.calls if not asked.task.done()]
        if running:
            await asyncio.wait(running, timeout=SETTLE_S)
        self._unfinished += sum(not answering.done() for answering in running)
        await self.stop()

    async def stop(self) -> None:
        """Stop all running calls."""
        self.closed.set()
        await cancel([asked.task for asked in self.calls])

    def stopped_sample(self) -> Sample | None:
        """The calls so far, for the next attempt, if the group is being stopped. Raises the error that ended the
        session, if any, such as `EngineDead`."""
        if self.answering.failure is not None:
            raise self.answering.failure
        return self.answering.so_far() if self._rollout.is_stopped() else None

    def sample(self, *, extra: Mapping[str, Any]) -> Sample:
        """The finished sample, with the segments of all trained calls."""
        answering, nodes = self.answering, self.tree.answered.nodes
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
        """The numbers of calls whose answer a client has."""
        return {asked.task.result().number for asked in self.calls if asked.is_seen}
