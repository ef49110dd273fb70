"""How full a buffer is, compared with its servers' memory and with the limit for its groups."""

import math
from typing import NamedTuple

FULL = 0.8
"""The share at which producers stop admitting prompts: the rest is reserved for results on their way."""


class Fullness(NamedTuple):
    """The used `share` of the `limit`, which is a server or run setting; 0 without a limit.

    `room_groups`, if known, is the number of further groups that would reach the limit. `used_bytes` of `limit_bytes`
    are used; both are 0 without a limit.
    """

    share: float = 0.0
    limit: str = "maxmemory"
    room_groups: float = math.inf
    used_bytes: int = 0
    limit_bytes: int = 0

    @classmethod
    def of_memory(cls, used_bytes: int, limit_bytes: int) -> "Fullness":
        """The fullness of a server whose `maxmemory` is `limit_bytes`; 0 means no limit."""
        if not limit_bytes:
            return cls()
        return cls(used_bytes / limit_bytes, used_bytes=used_bytes, limit_bytes=limit_bytes)

    @classmethod
    def of_groups(cls, expected_bytes: float, mean_bytes: float, limit_bytes: int, limit: str) -> "Fullness":
        """The fullness due to groups of `mean_bytes` each (0: unknown) that will take a total of `expected_bytes`."""
        room = max(0.0, FULL * limit_bytes - expected_bytes) / mean_bytes if mean_bytes else math.inf
        return cls(expected_bytes / limit_bytes, limit, room, round(expected_bytes), limit_bytes)

    @property
    def is_full(self) -> bool:
        """Whether nothing new is admitted."""
        return self.share >= FULL

    def __str__(self) -> str:
        """The fullness in words, for messages."""
        if self.limit == "maxmemory":
            return f"the server's memory is full to {self.share:.0%} of maxmemory"
        return f"groups take {self.share:.0%} of {self.limit}, including groups on the way"
