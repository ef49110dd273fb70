"""A role's tracer, if OpenTelemetry's variables ask for one. No error here keeps a role from starting."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from rollq.buffer.tracing.spans import GroupTrace, Span, trace_of
from rollq.buffer.tracing.variables import endpoint_of, other_protocol, redacted, shown_endpoint

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination for spans. `samples` and `emit` return at once."""

    def samples(self, trace_id: int) -> bool:
        """Whether a trace's spans are wanted."""

    def emit(self, spans: Sequence[Span]) -> None:
        """Send spans soon."""

    def close(self) -> None:
        """Send the remaining spans, for at most a short time."""


class Tracer:
    """Traces one run's groups."""

    def __init__(self, sink: Sink, run: str, incarnation: str) -> None:
        self._sink = sink
        self._run = run
        self._incarnation = incarnation
        self.emit = sink.emit
        self.close = sink.close

    def trace_of(self, task: str, group_id: int) -> GroupTrace | None:
        """A group's trace; None if the sampler leaves the group out."""
        trace = trace_of(self._run, self._incarnation, task, group_id)
        return trace if self._sink.samples(trace.trace_id) else None


def start_tracer(role: str, run: str, incarnation: Callable[[], str]) -> Tracer | None:
    """Start a role's tracer; returns None unless a collector is named. One warning says why a tracer cannot start."""
    variable, url = endpoint_of(os.environ)
    if not variable:
        return None
    name, protocol = other_protocol(os.environ)
    if name:
        log.warning(
            "no traces are sent: %s is %r, and rollq sends them over http/protobuf. Set "
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL to http/protobuf, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT to the "
            "collector's URL for it, such as http://localhost:4318/v1/traces",
            name, protocol,
        )  # fmt: skip
        return None
    try:
        from rollq.buffer.tracing.exporting import Exporting
    except ModuleNotFoundError as error:
        log.warning(
            "no traces are sent: %s is set, and the package %r is missing: pip install 'rollq[otel]'",
            variable, error.name,
        )  # fmt: skip
        return None
    try:
        sink = Exporting(role, run)
    except Exception as error:  # noqa: BLE001 - the SDK raises many types for wrong values
        given = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        log.warning(
            "no traces are sent: OpenTelemetry does not take one of %s: %s", given, redacted(str(error), os.environ)
        )
        return None
    log.info("traces go to %s", shown_endpoint(url))
    return Tracer(sink, run, incarnation())
