"""The log of requests that cannot be read. They may hold the token of a session, which is never logged.

Invariant: such requests cost one line a minute, however many come.
"""

import logging
from time import monotonic
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

PERIOD_S: Final = 60.0


class WithoutRequests(logging.Filter):
    """Replaces what aiohttp says of a request that it cannot read, and lets one such line pass in `PERIOD_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s = -PERIOD_S
        self._held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._held_back += 1
        if monotonic() - self._passed_s < PERIOD_S:
            return False
        record.msg, record.args = "%d requests could not be read: %s", (self._held_back, type(error).__name__)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        self._passed_s, self._held_back = monotonic(), 0
        return True


request_log = logging.getLogger(__name__)
request_log.addFilter(WithoutRequests())
