"""Spans of a group's life, as plain values. Pure.

A trace covers one group's life. Its id derives from the run's incarnation, the task and the group, and its spans' ids
derive from the trace's id, so that roles on different machines add to one trace without coordination.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import xxhash

Attributes = Mapping[str, str | int | float | bool]

NO_PARENT: Final = 0
MOST_ERROR: Final = 1000
"""The most characters sent of an error."""


class Span(NamedTuple):
    """One stretch of a group's life, in ms since 1970 on the server's clock. `error` says why it failed, or is ''.

    `parent_id` is `NO_PARENT` for the whole life's span.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ms: float
    end_ms: float
    attributes: Attributes
    error: str = ""


class GroupTrace(NamedTuple):
    """One group's trace. `facts` are attributes of all its spans."""

    trace_id: int
    facts: Attributes

    @property
    def life_id(self) -> int:
        """The id of the whole life's span."""
        return self.id_of("group")

    def attempt_id(self, attempt: int) -> int:
        """The id of an attempt's span: the parent of spans from workers that borrow its samples."""
        return self.id_of("attempt", attempt)

    def id_of(self, *names: str | int) -> int:
        """The id of the span with these names, unique in the trace and never 0."""
        return xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode(), seed=self.trace_id & _SEED) or 1

    def life(self, admitted_ms: float, end_ms: float, attributes: Attributes) -> Span:
        """The whole life's span."""
        return self.span("group", self.life_id, NO_PARENT, admitted_ms, end_ms, attributes)

    def part(self, name: str, number: int, start_ms: float, end_ms: float, attributes: Attributes) -> Span:
        """The span for part `number` with this name in the group's life."""
        return self.span(name, self.id_of(name, number), self.life_id, start_ms, end_ms, attributes)

    def span(
        self,
        name: str,
        span_id: int,
        parent_id: int,
        start_ms: float,
        end_ms: float,
        attributes: Attributes,
        error: str = "",
    ) -> Span:
        """Any span of this trace. A span never ends before it starts, even if clocks disagree. Truncates `error`."""
        facts = {**self.facts, **attributes}
        said = error[:MOST_ERROR].encode(errors="replace").decode()
        return Span(name, self.trace_id, span_id, parent_id, start_ms, max(start_ms, end_ms), facts, said)


def trace_of(run: str, incarnation: str, task: str, group_id: int) -> GroupTrace:
    """The trace of a group in a run with this incarnation."""
    trace_id = xxhash.xxh3_128_intdigest(f"{incarnation}/{task}/{group_id}".encode()) or 1
    return GroupTrace(trace_id, {"rollq.run": run, "rollq.task": task, "rollq.group": group_id})


_SEED = (1 << 64) - 1
