"""A collector of OpenTelemetry in the test's process: it decodes what it gets over HTTP, or does not answer."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class GotSpan:
    """A span as the collector has got it, with the name of its service."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name: str = span.name
        self.trace_id: bytes = span.trace_id
        self.span_id: bytes = span.span_id
        self.parent_id: bytes = span.parent_span_id
        self.start_ms, self.end_ms = span.start_time_unix_nano / 1e6, span.end_time_unix_nano / 1e6
        self.error: str = span.status.message
        self.attributes = attributes_of(span.attributes)


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


class Collector:
    """`spans` that have arrived, in `requests`, whose headers are kept. `status` is the status of its answers. It
    answers only while `answers` is set."""

    def __init__(self) -> None:
        self.spans: list[GotSpan] = []
        self.headers: list[dict[str, str]] = []
        self.requests = 0
        self.status = 200
        self.answers = threading.Event()
        self.answers.set()
        self.url = ""

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        """Decode a request, once it may be answered."""
        self.requests += 1
        self.headers.append(headers)
        self.answers.wait()
        if self.status != 200:
            return
        body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = attributes_of(resource.resource.attributes)["service.name"]
            self.spans += [GotSpan(service, span) for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[GotSpan]:
        """The spans of this name."""
        return [span for span in list(self.spans) if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Say nothing of roles that did not wait for an answer."""

    with Server(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            thread.join()
