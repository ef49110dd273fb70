"""Exponential back-off with jitter: one formula for Redis and HTTP servers. Pure."""

_MOST_DOUBLINGS = 60  # 2**60 of any first pause exceeds any longest pause


def backoff_s(failures: int, *, first_s: float, longest_s: float, jitter: float) -> float:
    """Seconds to wait after `failures` failures in a row (from 1): `first_s`, doubling, up to `longest_s`.

    `jitter` in [0, 1) shortens the pause by up to half, so that clients that failed together do not return together.
    """
    doublings = min(failures - 1, _MOST_DOUBLINGS)
    return min(longest_s, first_s * 2.0**doublings) * (1 - jitter / 2)
