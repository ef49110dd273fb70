"""Spans on their way to a collector: what arrives, what is lost, and that nobody waits for either."""

import logging
import os
import socket
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollq.buffer.tracing import exporting
from rollq.buffer.tracing.spans import Span, trace_of
from rollq.buffer.tracing.tracer import Tracer, start_tracer
from support.collector import Collector, collecting
from support.waiting import PATIENCE_S, wait_until

INCARNATION = "0" * 32
TRACE = trace_of("sums", INCARNATION, "math", 7)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of OpenTelemetry, and spans that are sent soon, for whose last ones a role waits."""
    monkeypatch.setattr(exporting, "EXIT_S", PATIENCE_S)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def parts(count: int) -> list[Span]:
    return [TRACE.part("waiting", number, 1000.0, 1002.5, {"rollq.step": number}) for number in range(count)]


def started() -> Tracer:
    tracer = start_tracer("worker", "sums", lambda: INCARNATION)
    assert tracer
    return tracer


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_spans_reach_the_sdks_exporter_as_they_are() -> None:
    memory = InMemorySpanExporter()
    sink = exporting.Exporting("trainer", "sums", memory)
    failed = TRACE.span("attempt", TRACE.attempt_id(1), TRACE.life_id, 900.0, 1000.0, {"rollq.attempt": 1}, "no GPU")
    sink.emit([TRACE.life(1000.0, 2000.25, {}), failed])
    sink.close()
    life, attempt = memory.get_finished_spans()
    assert (life.name, life.parent, life.start_time, life.end_time) == ("group", None, 10**9, 2_000_250_000)
    assert life.attributes == TRACE.facts
    assert life.resource.attributes["service.name"] == "rollq-trainer"
    assert life.resource.attributes["rollq.run"] == "sums"
    assert life.status.is_unset
    assert attempt.context.trace_id == life.context.trace_id == TRACE.trace_id
    assert attempt.context.span_id == TRACE.attempt_id(1)
    assert attempt.parent
    assert attempt.parent.span_id == life.context.span_id
    assert (attempt.status.is_ok, attempt.status.description) == (False, "no GPU")


def test_a_collector_gets_them_over_http(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    tracer = started()
    tracer.emit(parts(700))
    tracer.close()
    assert [span.attributes["rollq.step"] for span in collector.spans] == list(range(700))
    assert {(span.service, span.name, span.start_ms, span.end_ms) for span in collector.spans} == {
        ("mine", "waiting", 1000.0, 1002.5)
    }
    assert {headers["api-key"] for headers in collector.headers} == {"s3cret"}


def test_the_sampler_leaves_out_whole_traces(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    tracers = [started(), started()]
    chosen = [[tracer.trace_of("math", group) is not None for group in range(1000)] for tracer in tracers]
    assert chosen[0] == chosen[1]
    assert 150 < sum(chosen[0]) < 350
    for tracer in tracers:
        tracer.close()


def test_a_collector_that_hangs_delays_nobody_and_what_is_lost_is_said(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # 512 spans are sent at once
    monkeypatch.setattr(exporting, "EXIT_S", 0.1)
    collector.answers.clear()
    tracer = started()
    tracer.emit(parts(512))
    wait_until(lambda: collector.requests == 1)
    tracer.emit(parts(700))  # 600 wait
    (said,) = warnings_of(caplog)
    assert said == f"traces: 1 spans are lost, on the way to {collector.url}: 600 spans wait already"
    assert not collector.answers.is_set()
    tracer.close()  # returns, though the collector still hangs
    assert not collector.answers.is_set()
    assert warnings_of(caplog)[1:] == ["traces: 1212 spans were not sent, and 0 were"]


def test_a_collector_that_is_gone_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/v1/traces?key=s3cret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    tracer = started()
    tracer.emit(parts(3))
    wait_until(lambda: bool(warnings_of(caplog)))
    tracer.close()
    assert f"spans are lost, on the way to {url}/v1/traces: " in warnings_of(caplog)[0]
    assert warnings_of(caplog)[1] == "traces: 3 spans were not sent, and 0 were"
    assert "s3cret" not in caplog.text


def test_a_refusal_is_said_without_the_key(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.replace("//", "//me:s3cret@"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
    collector.status = 401
    tracer = started()
    tracer.emit(parts(3))
    wait_until(lambda: bool(warnings_of(caplog)))
    tracer.close()
    assert f"spans are lost, on the way to {collector.url}: " in warnings_of(caplog)[0]
    assert "401" in warnings_of(caplog)[0]
    assert "s3cret" not in caplog.text


def test_wrong_values_are_said_once_and_traces_go_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "s3cret without a name")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "lz4")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "sometimes")
    tracer = started()
    tracer.emit(parts(1))
    tracer.close()
    assert len(collector.spans) == 1
    said = warnings_of(caplog)
    assert len(said) == 5
    for word in ("soon", "lz4", "many", "sometimes"):
        assert sum(word in line for line in said) == 1
    assert "s3cret" not in caplog.text


def test_values_that_the_sdk_refuses_turn_traces_off(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-1")
    assert start_tracer("worker", "sums", lambda: INCARNATION) is None
    (said,) = warnings_of(caplog)
    assert "OTEL_BSP_SCHEDULE_DELAY" in said


def test_the_missing_package_is_said(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "rollq.buffer.tracing.exporting")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert start_tracer("worker", "sums", lambda: INCARNATION) is None
    (said,) = warnings_of(caplog)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in said
    assert "pip install 'rollq[otel]'" in said


def test_a_collector_for_grpc_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert start_tracer("worker", "sums", lambda: INCARNATION) is None
    (said,) = warnings_of(caplog)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'" in said


def test_others_of_the_process_still_hear_the_sdk(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    started().close()
    logging.getLogger("opentelemetry.sdk.trace.export").warning("mine")
    assert "mine" in warnings_of(caplog)


def test_a_forked_child_sends_nothing_of_its_parent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    tracer = started()
    tracer.emit(parts(3))
    if (child := os.fork()) == 0:
        tracer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert collector.requests == 0
    tracer.close()
    assert len(collector.spans) == 3
