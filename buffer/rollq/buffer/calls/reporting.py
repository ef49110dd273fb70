"""A run's last reported state, so that several watchers report each change once."""

import secrets
from typing import Final, cast

from rollq.buffer.calls.core import BufferCore

KEPT_S: Final = 30 * 86_400


class Reporting(BufferCore):
    """The call for the only note that monitors write."""

    def replace_reported_state(self, state: str, *, if_absent: bool = False) -> str | None:
        """Record that the caller reports `state`; returns the last reported state, None without one.

        If several callers report the same new state, all but one get that state back. `if_absent` keeps an earlier
        state. The record lasts 30 days.
        """
        key = self.keys.reported_state
        before = _state_in(found := self.send("GET", key))
        if before == state:
            return before
        note = f"{secrets.token_hex(8)} {state}".encode()

        def replace() -> bytes | None:
            return cast(bytes | None, self.servers.of(key).set(key, note, ex=KEPT_S, nx=if_absent, get=True))

        replaced = self.servers.patiently(replace, self.patience)
        return _state_in(found if replaced == note else replaced)  # its own: the first reply was lost


def _state_in(note: bytes | None) -> str | None:
    return None if note is None else note.decode("utf-8", "replace").partition(" ")[2]
