"""The state of a run that was last reported to somebody, so that several watchers report a change once."""

import secrets
from typing import Final, cast

from rollq.buffer.calls.core import BufferCore

KEPT_S: Final = 30 * 86_400


class Reporting(BufferCore):
    """The one note that a monitor leaves."""

    def replace_reported_state(self, state: str, *, if_absent: bool = False) -> str | None:
        """Note that `state` is reported now; returns the state that was reported before, None without one.

        Of several callers with the same new state, all but one get that state. `if_absent`: keep a state that was
        reported. A note is kept for 30 days.
        """
        key = self.keys.reported_state
        before = _state_in(found := self.send("GET", key))
        if before == state:
            return before
        note = f"{secrets.token_hex(8)} {state}".encode()

        def replace() -> bytes | None:
            return cast(bytes | None, self.servers.of(key).set(key, note, ex=KEPT_S, nx=if_absent, get=True))

        replaced = self.servers.patiently(replace, self.patience)
        return _state_in(found if replaced == note else replaced)  # our own: a repeat, whose first reply was lost


def _state_in(note: bytes | None) -> str | None:
    return None if note is None else note.decode("utf-8", "replace").partition(" ")[2]
