"""Decides whether to retry a failed request, and after which pause. Pure: no clock, no network, no random numbers."""

from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from math import isfinite

from rollq.buffer.common import backoff

TRANSIENT = frozenset({408, 425, 429})
"""Statuses below 500 that do not mean that the request is wrong."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries` more tries after the first; the pause doubles from `first_s` up to `longest_s`."""

    retries: int
    first_s: float
    longest_s: float


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later: the server is overloaded or failed."""
    return status in TRANSIENT or status >= 500


def backoff_s(policy: RetryPolicy, failures: int, retry_after_s: float | None, jitter: float) -> float | None:
    """The seconds to wait after `failures` failures of a request (see `growing_pause_s`); None means give up."""
    return None if failures > policy.retries else growing_pause_s(policy, failures, retry_after_s, jitter)


def growing_pause_s(policy: RetryPolicy, failures: int, retry_after_s: float | None, jitter: float) -> float:
    """The seconds to wait after `failures` failures in a row, at least as many as the server asks for.

    `jitter` in [0, 1): see `rollq.buffer.common.backoff`.
    """
    pause_s = backoff.backoff_s(failures, first_s=policy.first_s, longest_s=policy.longest_s, jitter=jitter)
    return pause_s if retry_after_s is None else max(pause_s, retry_after_s)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """The seconds in a Retry-After header, a number or a date; None if the header is missing or invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError):  # TypeError: a date without its zone
            return None
    return max(0.0, seconds) if isfinite(seconds) else None
