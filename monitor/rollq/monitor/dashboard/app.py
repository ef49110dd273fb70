"""The dashboard's ASGI apps: for a live run, with events, changes, and the endpoints of `rollq metrics`; and for an
archive.

The run's state comes from a `RunStatus` and groups from a `GroupView`, as in `rollq status` and `rollq groups show`.

/api/status                      as `rollq status --json`
/api/events                      the same each second, as server-sent events; the event `lost` says why there is none
/api/history?minutes=            columns of numbers for each task, at most 360 points
/api/curves?run=                 columns of numbers by train step, at most 1,000 points
/api/runs                        runs of the server with curves
/api/groups                      groups with the outcome of each sample, by these parameters:
    task, status, step
    prompt, q                    texts in the prompt, and in the answers
    min_reward, max_reward, min_tokens, max_tokens, finish    a sample fits all of these
    prompt_of                    TASK/GROUP: groups of the same prompt
    sort, limit, after           as -tokens: highest first; `after` is in the previous page, null in the last page
/api/groups/TASK/GROUP           a group, with the first 600 tokens of each sample
/api/groups/TASK/GROUP/tokens    more tokens, at most 4,000: sample, start, count
/api/changes                     takes {"order": "drop", "kind": "group", "name": "math/12", "dry_run": true} by POST,
                                 with the token

Errors are {"error": ...} with status 400, 403 without the token, 404, or 503 for a run that cannot be read. An archive
has only the addresses of groups.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from rollq.buffer.calls.orders import GroupOrder, Order
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.listening.connections import identify
from rollq.buffer.values.history import HISTORY_ROW_MS, HISTORY_ROWS
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard.access import refusal_of
from rollq.monitor.dashboard.answers import Unreadable, answer, dumps, json_endpoint, number_of
from rollq.monitor.dashboard.browsing import Browsing
from rollq.monitor.dashboard.curve_pages import CurvePages, CurveSource
from rollq.monitor.dashboard.events import Events
from rollq.monitor.dashboard.live_rollouts import Reader
from rollq.monitor.dashboard.orders import Steering, preview_of_group
from rollq.monitor.dashboard.series import series
from rollq.monitor.metrics.app import metrics_app
from rollq.monitor.metrics.shared_status import SharedReading
from rollq.monitor.status.text import as_json_line

STATIC = Path(__file__).parent / "static"

ORDER = (Status.COMPLETED, Status.CLAIMED, Status.ARCHIVED, Status.GATHERED, Status.COOLING, Status.RUNNING)
BROWSED = (*ORDER, *(status for status in Status if status not in ORDER))
"""The order of statuses in lists: groups with samples come first."""
MOST_BODY_BYTES = 10_000
FORM = (
    "a change is {order, kind, name, dry_run}: pause, run or drain a run, task or worker; requeue, quarantine or drop "
    "a group, whose name is TASK/NUMBER"
)


class Dashboard:
    """A live run's endpoints. Endpoints that read the run do so in threads, one at a time."""

    def __init__(
        self,
        run: str,
        reader: Reader,
        reading: SharedReading,
        browsing: Browsing,
        curves: CurveSource,
        steering: Steering,
        token: str | None,
    ) -> None:
        """Without a `token`, changes are refused."""
        self._run, self._reader, self._reading, self._browsing = run, reader, reading, browsing
        self._curves = CurvePages(run, curves)
        self._steering, self._token = steering, token
        self._histories: dict[int, tuple[float, bytes]] = {}
        self.events = Events(self._event)

    def app(self) -> Starlette:
        """The app with all routes."""
        metrics = metrics_app(self._run, self._reading.status)
        return Starlette(
            routes=[
                *_page({**self._browsing.about(), "may_change": self._token is not None, "archive": None}),
                *self._browsing.routes(),
                Route("/api/status", json_endpoint(self._status)),
                Route("/api/history", json_endpoint(self._history)),
                *self._curves.routes(),
                Route("/api/events", self.events),
                Route("/api/changes", self._change, methods=["POST"]),
                *metrics.routes,
            ]
        )

    def _status(self, _request: Request) -> bytes:
        if (status := self._reading.status()) is None:
            raise Unreadable(self._reading.problem)
        return as_json_line(status).encode()

    def _event(self) -> bytes:
        """The status as an event, or the event `lost` with the reason."""
        if (status := self._reading.status()) is not None:
            return b"data: %b\n\n" % as_json_line(status).encode()
        return b"event: lost\ndata: %b\n\n" % orjson.dumps(self._reading.problem)

    def _history(self, request: Request) -> bytes:
        """The last `minutes` of each task, read at most twice per row of the history."""
        minutes = number_of(request, "minutes", 60, most=HISTORY_ROWS * HISTORY_ROW_MS // 60_000)
        at_s, cached = self._histories.get(minutes, (0.0, b""))
        if cached and time.monotonic() - at_s < HISTORY_ROW_MS / 2000:
            return cached
        rows = minutes * 60_000 // HISTORY_ROW_MS
        columns = self._reader.call(
            lambda buffer: {task: series(buffer.overview(task, rows).rows) for task in buffer.tasks()}
        )
        self._histories = {**dict(list(self._histories.items())[-3:]), minutes: (time.monotonic(), dumps(columns))}
        return self._histories[minutes][1]

    async def _change(self, request: Request) -> Response:
        if refusal := refusal_of(request, self._token):
            return answer({"error": refusal}, 403)
        identify(self._token)
        if (body := await _bounded_body(request)) is None:
            return answer({"error": "the request is too long"}, 413)
        return await run_in_threadpool(json_endpoint(lambda _: self._make_change(body)), request)

    def _make_change(self, body: bytes) -> Any:
        change = _parse_change(body)
        if isinstance(change.order, GroupOrder):
            return self._order_group(change.order, change)
        preview = self._steering.preview(self._reader.read(), change.order, change.kind, change.name)
        if change.dry_run or not preview.is_possible:
            return {"title": preview.title, "text": preview.text, "is_possible": preview.is_possible, "done": []}
        return {"title": preview.title, "done": self._steering.make(change.order, change.kind, change.name)}

    def _order_group(self, order: GroupOrder, change: "_Change") -> Any:
        task, _, text = change.name.partition("/")
        if (number := whole_number(text)) is None:
            raise ValueError(FORM)
        ordered = self._steering.order_group(task, number, order, dry_run=change.dry_run)
        preview = preview_of_group(task, number, order, ordered)
        done = [] if change.dry_run else [f"{task} {number}: {preview.text}"]
        return {"title": preview.title, "text": preview.text, "is_possible": preview.is_possible, "done": done}


class _Change(NamedTuple):
    """A requested change."""

    order: Order | GroupOrder
    kind: str
    name: str
    dry_run: bool


def _parse_change(body: bytes) -> _Change:
    try:
        given = orjson.loads(body)
        kind, name = str(given["kind"]), str(given.get("name", ""))
        order = GroupOrder(given["order"]) if kind == "group" else Order(given["order"])
        return _Change(order, kind, name, given["dry_run"] is not False)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(FORM) from error


def archive_app(url: str, tasks: list[str], browsing: Browsing) -> Starlette:
    """The app for an archive: the same page with only the archive's rollouts."""
    about = {**browsing.about(), "may_change": False, "archive": {"url": url, "tasks": tasks}}
    return Starlette(routes=[*_page(about), *browsing.routes()])


def _page(about: dict[str, Any]) -> list[BaseRoute]:
    """The page, its files, and the facts that it needs before other requests."""

    async def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    return [
        Route("/", page),
        Route("/api/about", json_endpoint(lambda _request: about)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]


async def _bounded_body(request: Request) -> bytes | None:
    """Read a request's body. Returns None for a body that is too long, without reading the rest."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            return None
    return body
