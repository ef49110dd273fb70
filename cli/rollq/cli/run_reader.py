"""Reads a run again and again, even before it exists, or while its server is down."""

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RollqError
from rollq.buffer.store.connection import Patience
from rollq.cli.run_location import RunLocation
from rollq.monitor.status.read import RunStatus, read_status

UNANSWERED_S = 2.0
"""How long a reading waits for the server."""

T = TypeVar("T")


class RunReader:
    """Connects at the first call, and again after a failed one. For one thread at a time."""

    def __init__(self, location: RunLocation, connect: Callable[[Patience], Buffer] | None = None) -> None:
        """`connect`: opens the run's buffer; by default one that reads no large payloads."""
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

    def call(self, do: Callable[[Buffer], T]) -> T:
        """Return `do` of the run's buffer. Raises what it raises, and `ServerUnavailable`, `ServerRefused`."""
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
