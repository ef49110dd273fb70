"""The endpoints of curves by train step."""

import time
from typing import Protocol

from starlette.requests import Request
from starlette.routing import Route

from rollq.monitor.dashboard.answers import dumps, json_endpoint
from rollq.monitor.dashboard.curves import columns
from rollq.monitor.report.curves import RunCurves

KEPT_S = 2.0
"""For this many seconds, a run's curves are answered from memory once they have been read."""
RUNS_KEPT_S = 30.0
"""The same for the list of a server's runs; reading it scans all keys."""
MOST_KEPT = 8


class CurveSource(Protocol):
    """Reads curves, from any thread. Both methods raise `RollqError` on failure."""

    def of(self, run: str) -> RunCurves:
        """The curves of the run, or of another run on its server."""
        ...

    def runs(self) -> list[str]:
        """The runs of the server that have curves."""
        ...


class CurvePages:
    """The endpoints `/api/curves` and `/api/runs`. They run in threads."""

    def __init__(self, run: str, source: CurveSource) -> None:
        self._run, self._source = run, source
        self._kept: dict[str, tuple[float, bytes]] = {}

    def routes(self) -> list[Route]:
        """The routes of both endpoints."""
        return [Route("/api/curves", json_endpoint(self._curves)), Route("/api/runs", json_endpoint(self._runs))]

    def _curves(self, request: Request) -> bytes:
        run = request.query_params.get("run") or self._run
        if (kept := self._still_kept(run, KEPT_S)) is None:
            kept = self._keep(run, dumps(columns(self._source.of(run))))
        return kept

    def _runs(self, _request: Request) -> bytes:
        if (kept := self._still_kept("", RUNS_KEPT_S)) is None:
            kept = self._keep("", dumps({"runs": self._source.runs()}))
        return kept

    def _still_kept(self, name: str, for_s: float) -> bytes | None:
        at_s, answer = self._kept.get(name, (0.0, b""))
        return answer if answer and time.monotonic() - at_s < for_s else None

    def _keep(self, name: str, answer: bytes) -> bytes:
        others = [item for item in self._kept.items() if item[0] != name]
        self._kept = dict([*others[-MOST_KEPT + 1 :], (name, (time.monotonic(), answer))])
        return answer
