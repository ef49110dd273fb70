"""The dashboard as an ASGI app: one page, its JSON, server-sent events, and the endpoints of `rollq metrics`.

Everything that it shows comes from a `RunStatus` or a `GroupView`, as in `rollq status` and `rollq show`.
"""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rollq.buffer.errors import ConfigError, QueryError, RollqError
from rollq.buffer.history import HISTORY_ROW_MS, HISTORY_ROWS
from rollq.buffer.looking import FoundGroup
from rollq.buffer.query.pages import Selection
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rollouts import Status
from rollq.buffer.steering import Order
from rollq.monitor.dashboard.access import refusal_of
from rollq.monitor.dashboard.events import Events
from rollq.monitor.dashboard.groups import TokenTexts, chosen, group_of, row_of, tokens_of
from rollq.monitor.dashboard.series import series
from rollq.monitor.dashboard.steering import Steering
from rollq.monitor.group_view import view_of
from rollq.monitor.metrics.app import metrics_app
from rollq.monitor.metrics.reading import SharedReading
from rollq.monitor.screen import as_json_line
from rollq.monitor.status import RunStatus

STATIC = Path(__file__).parent / "static"
T = TypeVar("T")

ORDER = (Status.COMPLETED, Status.CLAIMED, Status.ARCHIVED, Status.GATHERED, Status.COOLING, Status.RUNNING)
BROWSED = (*ORDER, *(status for status in Status if status not in ORDER))
"""The order in which statuses are listed: groups that have samples come first."""
MOST_BODY_BYTES = 10_000


class Reader(Protocol):
    """Reads a run, from any thread."""

    def read(self) -> RunStatus:
        """Read the status now. Raises `RollqError`."""
        ...

    def call(self, do: Callable[[MonitorBuffer], T]) -> T:
        """Return `do` of the run's buffer. Raises what it raises, and `RollqError` where the run cannot be read."""
        ...


class Dashboard:
    """The endpoints. Those that read the run work in threads, one at a time."""

    def __init__(
        self,
        run: str,
        reader: Reader,
        reading: SharedReading,
        texts: TokenTexts,
        steering: Steering,
        token: str | None,
    ) -> None:
        """Without a `token`, nothing can be changed."""
        self._run, self._reader, self._reading, self._texts = run, reader, reading, texts
        self._steering, self._token = steering, token
        self._histories: dict[int, tuple[float, bytes]] = {}
        self.events = Events(self._event)

    def app(self) -> Starlette:
        """The app with all routes."""
        metrics = metrics_app(self._run, self._reading.status)
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/api/about", _json(self._about)),
                Route("/api/status", _json(self._status)),
                Route("/api/history", _json(self._history)),
                Route("/api/events", self.events),
                Route("/api/groups", _json(self._groups)),
                Route("/api/groups/{task}/{group:int}", _json(self._group)),
                Route("/api/groups/{task}/{group:int}/tokens", _json(self._tokens)),
                Route("/api/changes", self._change, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC)),
                *metrics.routes,
            ]
        )

    async def _page(self, _request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    def _about(self, _request: Request) -> Any:
        return {
            "run": self._run,
            "rollq": version("rollq"),
            "may_change": self._token is not None,
            "statuses": [status.value for status in BROWSED],
            "tokens": self._texts.note,
        }

    def _status(self, _request: Request) -> bytes:
        if (status := self._reading.status()) is None:
            raise _Unreadable(self._reading.problem)
        return as_json_line(status).encode()

    def _event(self) -> bytes:
        """The status as an event, or as the event `lost` why there is none."""
        if (status := self._reading.status()) is not None:
            return b"data: %b\n\n" % as_json_line(status).encode()
        return b"event: lost\ndata: %b\n\n" % orjson.dumps(self._reading.problem)

    def _history(self, request: Request) -> bytes:
        """The last `minutes` of each task; read at most as often as the history grows."""
        minutes = _number(request, "minutes", 60, most=HISTORY_ROWS * HISTORY_ROW_MS // 60_000)
        at_s, cached = self._histories.get(minutes, (0.0, b""))
        if cached and time.monotonic() - at_s < HISTORY_ROW_MS / 2000:
            return cached
        rows = minutes * 60_000 // HISTORY_ROW_MS
        found = self._reader.call(
            lambda buffer: {task: series(buffer.overview(task, rows).rows) for task in buffer.tasks()}
        )
        self._histories = {**dict(list(self._histories.items())[-3:]), minutes: (time.monotonic(), _dumps(found))}
        return self._histories[minutes][1]

    def _groups(self, request: Request) -> Any:
        """A page of groups."""
        given = request.query_params
        statuses = chosen(given.get("status", ""), BROWSED, "status")
        step = _number(request, "step", None, least=1)

        def read(buffer: MonitorBuffer) -> Any:
            tasks = chosen(given.get("task", ""), buffer.tasks(), "task")
            selection = Selection(
                tasks, [Status(status) for status in statuses], step, given.get("prompt", ""), given.get("q", "")
            )
            return buffer.page(selection, after=given.get("after", ""), limit=_number(request, "limit", 50))

        page = self._reader.call(read)
        return {"groups": [row_of(group) for group in page.groups], "read": page.read, "after": page.after}

    def _group(self, request: Request) -> Any:
        group = self._look(request)
        return {**group_of(view_of(group), self._texts), "tokens": self._texts.note}

    def _tokens(self, request: Request) -> Any:
        """Further tokens of a sample."""
        samples, index = view_of(self._look(request)).samples, _number(request, "sample", 0)
        if index >= len(samples):
            raise ValueError(f"sample {index}: the group has {len(samples)}")
        count = _number(request, "count", 1000, least=1)
        return {"parts": tokens_of(samples[index], _number(request, "start", 0), count, self._texts)}

    def _look(self, request: Request) -> FoundGroup:
        task, number = request.path_params["task"], request.path_params["group"]
        found = self._reader.call(lambda buffer: buffer.look(task, [number]) if task in buffer.tasks() else [])
        if not found:
            raise _Missing(f"group {number} of {task} is not in the buffer: it was never there, or has left")
        return found[0]

    async def _change(self, request: Request) -> Response:
        if refusal := refusal_of(request, self._token):
            return _answer({"error": refusal}, 403)
        if int(request.headers.get("content-length") or 0) > MOST_BODY_BYTES:
            return _answer({"error": "the request is too long"}, 413)
        body = await request.body()
        return await run_in_threadpool(_json(lambda _: self._make_change(body)), request)

    def _make_change(self, body: bytes) -> Any:
        try:
            given = orjson.loads(body)
            order, kind, name = Order(given["order"]), str(given["kind"]), str(given.get("name", ""))
            is_dry = given["dry_run"] is not False
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError("a change is {order: pause, run or drain, kind, name, dry_run}") from error
        preview = self._steering.preview(self._reader.read(), order, kind, name)
        if is_dry or not preview.is_possible:
            return {"title": preview.title, "text": preview.text, "is_possible": preview.is_possible, "done": []}
        return {"title": preview.title, "done": self._steering.make(order, kind, name)}


class _Missing(RollqError):
    """There is no such group."""


class _Unreadable(RollqError):
    """The run cannot be read now."""


def _json(do: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that answers with JSON, also where something is wrong."""

    def endpoint(request: Request) -> Response:
        try:
            return _answer(do(request))
        except _Missing as error:
            return _answer({"error": str(error)}, 404)
        except (ValueError, QueryError, ConfigError) as error:
            return _answer({"error": str(error)}, 400)
        except RollqError as error:
            return _answer({"error": str(error)}, 503)

    return endpoint


def _answer(found: Any, status: int = 200) -> Response:
    body = found if isinstance(found, bytes) else _dumps(found)
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def _dumps(found: Any) -> bytes:
    return orjson.dumps(found, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _number(request: Request, name: str, default: Any, *, least: int = 0, most: int = 10**9) -> Any:
    """A whole number of the query. Raises `ValueError`."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"{name}={text}: a whole number from {least} to {most} is needed")
    return int(text)
