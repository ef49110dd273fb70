"""Numbers of bytes, with readable units and in the form of a server's configuration."""

import math

from rollq.buffer.common.counting import count as count


def in_words(size: float) -> str:
    """A number of bytes in a suitable unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def of_limit(used: int, limit: int) -> str:
    """Used bytes and their limit in brackets, to follow a share; empty without a limit."""
    return f" ({in_words(used)} of {in_words(limit)})" if limit else ""


def in_config(size: float) -> str:
    """A number of bytes in the form of the server's configuration, rounded up to MiB."""
    return f"{math.ceil(size / 2**20)}mb"


def seconds_in_words(seconds: float) -> str:
    """A number of seconds in a suitable unit."""
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
