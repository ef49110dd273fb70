"""Logs requests that cannot be read. They may hold a session's token, which is never logged.

Invariant: such requests add at most one line per minute.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError

from rollq.buffer.common.once_a_minute import OnceAMinute


class WithoutRequests(logging.Filter):
    """Replaces aiohttp's message about a request that it cannot read, and passes one such line per minute."""

    def __init__(self) -> None:
        super().__init__()
        self._unreadable = OnceAMinute()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, HttpProcessingError):
            return True
        if count := self._unreadable.count():
            record.msg, record.args = "%d requests could not be read: %s", (count, type(error).__name__)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return bool(count)


request_log = logging.getLogger(__name__)
request_log.addFilter(WithoutRequests())
