"""Failures that are logged only once: a broken judge, loop or pool fails thousands of samples a minute."""

import logging
from dataclasses import dataclass, field

MAX_KEYS = 100
"""The most distinct failures that one part logs. Further failures are recorded only where they happened, for example
with a sample."""


@dataclass(slots=True, eq=False)
class LogOnce:
    """Writes to `log`, but never the same failure twice.

    `LogOnce(log).warning(type(error), "pool %s failed", name, exc_info=error)` logs the first error of each type.
    """

    log: logging.Logger
    _logged: set[object] = field(default_factory=set)

    def warning(self, key: object, message: str, *args: object, exc_info: bool | BaseException | None = None) -> None:
        """Log a warning, unless a warning with this `key`, or `MAX_KEYS` others, have been logged."""
        if key in self._logged or len(self._logged) >= MAX_KEYS:
            return
        self._logged.add(key)
        self.log.warning(message, *args, exc_info=exc_info, stacklevel=2)
