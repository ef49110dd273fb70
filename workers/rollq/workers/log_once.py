"""What is worth a line in the log only once: a broken judge, loop or pool fails thousands of samples a minute."""

from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_TOLD = 100
"""Different failures of one part that are logged; all are kept with their samples."""


@dataclass(slots=True)
class LogOnce:
    """Remembers what was told."""

    _told: set[Hashable] = field(default_factory=set)

    def first(self, failure: Hashable) -> bool:
        """Whether this failure is to be told: it is the first of its kind, and there were not too many kinds."""
        if failure in self._told or len(self._told) >= MAX_TOLD:
            return False
        self._told.add(failure)
        return True
