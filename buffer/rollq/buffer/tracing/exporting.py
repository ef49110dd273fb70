"""Sends spans to a collector with OpenTelemetry's processor and exporter, and counts lost spans. Only this module
imports OpenTelemetry. Invariant: emitting a span never makes the caller wait. A thread sends spans from a bounded
queue. Spans that find the queue full, or that the collector does not take, are counted and logged.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.tracing.spans import NO_PARENT, Span
from rollq.buffer.tracing.variables import endpoint_of, redacted, shown_endpoint

log = logging.getLogger(__name__)

QUEUE = "OTEL_BSP_MAX_QUEUE_SIZE"
MOST_SPANS = 16_384
"""The most queued spans, about 16 MiB, unless `OTEL_BSP_MAX_QUEUE_SIZE` overrides it."""
EXIT_S = 1.0
"""How long a role that ends waits for its last spans, in seconds."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("rollq")
_heard = threading.local()


class Exporting:
    """Sends one role's spans to the collector that the environment names, or to `exporter`."""

    def __init__(self, role: str, run: str, exporter: SpanExporter | None = None) -> None:
        """Raises various SDK errors for `OTEL_...` values that the SDK does not accept."""
        with _hearing() as said:
            self._resource = _resource(role, run)
            self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
            self._delivery = Delivery(exporter or OTLPSpanExporter())
            self._most = _queue_size()
            self._processor = BatchSpanProcessor(self._delivery, max_queue_size=self._most)
        for line in said:
            log.warning("traces: %s", line)

    def samples(self, trace_id: int) -> bool:
        """Whether a trace's spans are wanted: `OTEL_TRACES_SAMPLER` decides, for all roles alike."""
        return self._sampler.should_sample(None, trace_id, "group").decision is Decision.RECORD_AND_SAMPLE

    def emit(self, spans: Sequence[Span]) -> None:
        """Send spans soon, as far as the queue has room."""
        delivery = self._delivery
        for span in spans:
            if delivery.waiting >= self._most:
                delivery.refused += 1
                delivery.lose(1, f"{self._most} spans wait already")
            else:
                delivery.queued += 1
                self._processor.on_end(self._converted(span))

    def close(self) -> None:
        """Send the remaining spans, for at most `EXIT_S`."""
        ending = threading.Thread(target=self._processor.shutdown, name="rollq-traces-end", daemon=True)
        ending.start()
        ending.join(EXIT_S)
        self._delivery.end()

    def _converted(self, span: Span) -> ReadableSpan:
        def context(span_id: int, *, is_remote: bool) -> SpanContext:
            return SpanContext(span.trace_id, span_id, is_remote, _SAMPLED)

        return ReadableSpan(
            span.name,
            context(span.span_id, is_remote=False),
            parent=None if span.parent_id == NO_PARENT else context(span.parent_id, is_remote=True),
            resource=self._resource,
            attributes=span.attributes,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=round(span.start_ms * 1000) * 1000,
            end_time=round(span.end_ms * 1000) * 1000,
            instrumentation_scope=_SCOPE,
        )


class Delivery(SpanExporter):
    """An exporter that counts spans: `queued` entered the queue, `refused` did not, `taken` have left the queue, and
    `sent` have reached the collector."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.queued = self.refused = self.taken = self.sent = 0
        self._exporter = exporter
        self._losing = threading.Lock()
        self._lines = OnceAMinute()
        self._where = shown_endpoint(endpoint_of(os.environ)[1])
        self._ended = False

    @property
    def waiting(self) -> int:
        """How many spans are in the queue."""
        return self.queued - self.taken

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Called in the processor's thread."""
        self.taken += len(spans)
        with _hearing() as said:
            try:
                result = self._exporter.export(spans)
            except Exception as error:  # noqa: BLE001 - no error of the SDK may end its thread
                result = SpanExportResult.FAILURE
                said.append(redacted(f"{type(error).__name__}: {error}", os.environ))
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.lose(len(spans), said[0] if said else "unknown reason")
        return result

    def lose(self, spans: int, reason: str) -> None:
        """Log once a minute how many spans are lost. Any thread may call this."""
        with self._losing:
            lost = 0 if self._ended else self._lines.count(spans)
        if lost:
            log.warning("traces: %d spans are lost, on the way to %s: %s", lost, self._where, reason)

    def end(self) -> None:
        """Log how many spans have not been sent yet; later losses are not logged."""
        self._ended = True
        if unsent := self.queued + self.refused - self.sent:
            log.warning("traces: %d spans were not sent, and %d were", unsent, self.sent)

    def shutdown(self) -> None:
        """Close the exporter."""
        with _hearing():
            self._exporter.shutdown()


class _Hearing(logging.Filter):
    """Keeps the SDK's messages, which may contain the endpoint's password or headers, out of the log while rollq uses
    the SDK."""

    def filter(self, record: logging.LogRecord) -> bool:
        said: list[str] | None = getattr(_heard, "said", None)
        if said is None:
            return True
        if record.levelno >= logging.WARNING:
            said.append(redacted(record.getMessage(), os.environ))
        return False


_HEARING = _Hearing()


@contextmanager
def _hearing() -> Iterator[list[str]]:
    """Collect the SDK loggers' warnings in this thread, without secrets. Other threads log as before."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.startswith(("opentelemetry", "urllib3", "requests")):
            logger.addFilter(_HEARING)
    _heard.said = said = list[str]()
    try:
        yield said
    finally:
        _heard.said = None


def _resource(role: str, run: str) -> Resource:
    resource = Resource.create({"rollq.run": run})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: f"rollq-{role}"}))
    return resource


def _queue_size() -> int:
    text = os.environ.get(QUEUE) or str(MOST_SPANS)
    try:
        return int(text)
    except ValueError:
        log.warning("traces: %s = %r is not a whole number; %d is used", QUEUE, text, MOST_SPANS)
        return MOST_SPANS
