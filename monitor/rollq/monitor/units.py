"""Numbers of bytes, for people and for the server's configuration."""

import math


def in_words(size: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def in_config(size: float) -> str:
    """A number of bytes as the server's configuration takes it, rounded up to MiB."""
    return f"{math.ceil(size / 2**20)}mb"
