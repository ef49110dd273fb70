"""The metrics as an ASGI app, for a separate server or as a part of another app."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rollq.monitor.metrics.families import RunCollector
from rollq.monitor.status.read import RunStatus


def metrics_app(
    run: str, status: Callable[[], RunStatus | None], calls: Callable[[], Mapping[str, int]] = dict
) -> Starlette:
    """An app with `/metrics`, in OpenMetrics or Prometheus format, and `/healthz`.

    `status`, called in a thread, returns the run's status, or None if it cannot be read. `calls` returns the number of
    `on_change` calls by outcome.
    """

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(RunCollector(run, await run_in_threadpool(status), calls()))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)])
