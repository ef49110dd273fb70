"""The location of a run: its servers, payloads and archive."""

import threading
from dataclasses import dataclass, field
from typing import Self

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store.connection import Patience


@dataclass(frozen=True, slots=True)
class Connection:
    """A run on the server or cluster at `url`. Its repr holds no password.

    `payloads` locates large frames outside the servers, identically for every role. `archive` is the URL of the run's
    archive, for annotations.
    """

    url: str = field(repr=False)
    run: str
    password: str | None = field(default=None, repr=False)
    payloads: PayloadSettings = field(default_factory=PayloadSettings)
    archive: str | None = None

    @classmethod
    def to(cls, place: "str | Connection", run: str | None) -> Self:
        """Return `place` if it is a connection, otherwise a connection to `run` at that URL. Raises `ConfigError` for a
        URL without a run, or a connection with one."""
        if isinstance(place, cls):
            if run is not None:
                raise ConfigError(f"run = {run!r}: the connection names the run {place.run!r} already; leave it out")
            return place
        if run is None:
            raise ConfigError("run is missing: name the run on this server")
        return cls(str(place), run)

    def buffer(self, stop: threading.Event | None = None) -> Buffer:
        """Open the run's buffer. Setting `stop` ends the buffer's waits for the server, and so does closing the buffer.

        Raises `ServerUnavailable`, `ServerRefused`, and `ConfigError` for an invalid run name or payload location.
        """
        patience = Patience(closed=stop or threading.Event())
        return Buffer.connect(self.url, self.run, password=self.password, patience=patience, payloads=self.payloads)
