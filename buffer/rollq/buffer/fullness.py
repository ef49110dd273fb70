"""How full a buffer is: of the memory of its servers, and of what its groups may take."""

from typing import NamedTuple

FULL = 0.8
"""Share from which producers admit nothing new: the rest is for results that are on their way."""


class Fullness(NamedTuple):
    """The used `share` of the `limit`, which is a setting of the server or of the run; 0 without a limit."""

    share: float = 0.0
    limit: str = "maxmemory"

    @property
    def is_full(self) -> bool:
        """Whether nothing new is admitted."""
        return self.share >= FULL

    def __str__(self) -> str:
        """For messages."""
        if self.limit == "maxmemory":
            return f"the server's memory is full to {self.share:.0%} of maxmemory"
        return f"groups take {self.share:.0%} of {self.limit}, with those that are on their way"
