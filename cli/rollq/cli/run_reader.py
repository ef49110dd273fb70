"""Reads a run repeatedly, even before it exists or while its server is down, and finds the run's curves."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TypeVar

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.runs import runs_with_curves
from rollq.buffer.errors import RollqError, ServerRefused, ServerUnavailable, StoreLost
from rollq.buffer.store.connection import Patience
from rollq.cli.run_location import RunLocation
from rollq.cli.settings.file import load_settings
from rollq.monitor.report.curves import RunCurves, curves_in, read_curves
from rollq.monitor.status.read import RunStatus, read_status

log = logging.getLogger(__name__)

UNANSWERED_S = 2.0
"""How long a reading waits for the server, in seconds."""

T = TypeVar("T")


class RunReader:
    """Connects on the first call, and reconnects after a failed call. Only one thread at a time may use it."""

    def __init__(self, location: RunLocation, connect: Callable[[Patience], Buffer] | None = None) -> None:
        """`connect` opens the run's buffer, by default without large payloads."""
        self._connect = connect or location.without_payloads
        self._queue = location.queue()
        self._buffer: Buffer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read(self) -> RunStatus:
        """Read the status. Raises `ServerUnavailable`, `ServerRefused`, or `StoreLost` without such a run."""
        return self.call(lambda buffer: read_status(buffer, self._queue, Patience(UNANSWERED_S, UNANSWERED_S)))

    def note_state(self, state: str, if_absent: bool) -> str | None:
        """Record the reported state; see `Buffer.replace_reported_state`. Raises the exceptions of `call`."""
        return self.call(lambda buffer: buffer.replace_reported_state(state, if_absent=if_absent))

    def call(self, do: Callable[[Buffer], T]) -> T:
        """Return `do(buffer)` for the run's buffer. Raises the exceptions of `do`, `ServerUnavailable`,
        `ServerRefused`."""
        try:
            if self._buffer is None:
                self._buffer = self._connect(Patience(UNANSWERED_S, UNANSWERED_S))
            return do(self._buffer)
        except RollqError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        self._queue.connection.close()


class Call(Protocol):
    """Calls `do` with the run's buffer, like `RunReader.call`."""

    def __call__(self, do: Callable[[Buffer], T]) -> T: ...


class CurveFinder:
    """Finds the curves of the run at `location`, whose buffer `call` reads, and of other runs on its server."""

    def __init__(self, location: RunLocation, call: Call) -> None:
        self._location, self._call = location, call

    def of(self, run: str) -> RunCurves:
        """The curves of a run. For the location's run, they come from files if its server or the run is gone.

        Without files, and for other runs, raises an error that says why the server has no curves.
        """
        if run != self._location.run:
            patience = Patience(UNANSWERED_S, UNANSWERED_S)
            with replace(self._location, run=run).without_payloads(patience) as buffer:
                return read_curves(buffer)
        try:
            return self._call(read_curves)
        except (ServerUnavailable, StoreLost) as error:
            if (found := self._in_files(str(error))) is None:
                raise
            return found

    def runs(self) -> list[str]:
        """The names of the server's runs with curves; only this run for a user that may not list other runs."""
        try:
            return self._call(lambda buffer: runs_with_curves(buffer.servers, buffer.patience))
        except ServerRefused as error:
            log.debug("cannot look for other runs: %s", error)
            return [self._location.run]

    def _in_files(self, why: str) -> RunCurves | None:
        trainer = load_settings(self._location.file).trainer if self._location.file else None
        found = curves_in(trainer.output, self._location.run, why) if trainer else None
        return found if found and (found.rows.steps or found.rows.evaluations) else None
