"""Spans of trained groups: the wait for the claim, the training, and the whole life.

Times are the server's.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rollq.buffer.calls.group_lives import GroupLife
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import RollqError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.tracing.spans import Attributes
from rollq.buffer.tracing.tracer import Tracer

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class GroupTraces:
    """Ends the traces of each batch's groups, if there is a tracer."""

    def __init__(self, tracer: Tracer | None, buffer: Callable[[], TrainerBuffer]) -> None:
        self._tracer = tracer
        self._buffer = buffer
        self._unread = LogOnce(log)

    @contextmanager
    def committing(self, step: int, groups: Sequence[tuple[str, int]]) -> Iterator[None]:
        """A context for the commit of a step: reads its groups' lives before the commit, and ends their traces
        afterwards."""
        if self._tracer is None:
            yield
            return
        lives = self._asked(step, lambda: self._buffer().lives(step, groups))
        yield
        if lives and (committed_ms := self._asked(step, lambda: self._buffer().server_ms())):
            self._end(self._tracer, step, lives, committed_ms)

    def close(self) -> None:
        """Send the remaining spans, for a limited time."""
        if self._tracer is not None:
            self._tracer.close()

    def _asked(self, step: int, ask: Callable[[], Answer]) -> Answer | None:
        """The server's answer; None after an error, which the commit raises too if it persists."""
        try:
            return ask()
        except RollqError as error:
            self._unread.warning(type(error), "the traces of step %d have no end: %s", step, error)
            return None

    def _end(self, tracer: Tracer, step: int, lives: Sequence[GroupLife], committed_ms: int) -> None:
        for life in lives:
            trace = tracer.trace_of(life.task, life.group_id)
            if trace is None:
                continue
            facts: Attributes = {"rollq.step": step, "rollq.oldest_version": life.oldest_version}
            whole: Attributes = {
                **facts,
                "rollq.outcome": "trained",
                "rollq.attempt": life.attempt,
                "rollq.tokens": life.tokens,
                "rollq.mean_reward": life.reward,
            }
            tracer.emit(
                [
                    trace.part("waiting", step, life.put_ms, life.claimed_ms, facts),
                    trace.part("train", step, life.claimed_ms, committed_ms, facts),
                    trace.life(life.admitted_ms, committed_ms, whole),
                ]
            )
