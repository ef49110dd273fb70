"""External payloads: large frames that are neither in their task's slot nor pass through its functions.

Nothing holds such a payload and the group that names it together, so every moment in between is safe instead:

- A worker writes the payload under a new name, which has the nonce of its lease, and then puts the group, which names
  the payload. The lease is the note that such a payload may exist.
- The function that drops a payload from a group adds its name to the task's garbage. Any role removes the payload, and
  then its name from the garbage. Both may be repeated, because names are never used again.
- A worker that dies, or whose lease runs out, leaves payloads that no group has ever named. An audit finds them: see
  `rollq.buffer.calls.payload_removal`.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, Self, TypeVar

from rollq.buffer.wire.joined_frame import Pieces

T = TypeVar("T")
Frame = bytes | memoryview

NAME = re.compile(r"([a-z]+):(\d+):([^:/-]+-[^:/-]+)")
"""As `AWAY_NAME` in `lua/common/samples.lua`."""


class PayloadName(NamedTuple):
    """The name of a payload: which store has it, and whose it is. `leaf`: nonce of the lease, and a suffix."""

    task: str
    place: str
    group_id: int
    leaf: str

    @classmethod
    def new(cls, task: str, place: str, group_id: int, nonce: str) -> Self:
        """A name that nothing has had before."""
        return cls(task, place, group_id, f"{nonce}-{secrets.token_hex(4)}")

    @classmethod
    def parse(cls, task: str, text: str) -> Self | None:
        """The name that `encoded` has made, as the functions know it; None for one in the task's slot, or for none."""
        matched = NAME.fullmatch(text)
        return matched and cls(task, matched[1], int(matched[2]), matched[3])

    @property
    def encoded(self) -> str:
        """Without the task."""
        return f"{self.place}:{self.group_id}:{self.leaf}"


Write = Callable[[PayloadName, bytes | Pieces], None]


class PayloadStore(Protocol):
    """Where payloads are. Thread-safe.

    Every method waits for a store that is unavailable, and raises `ServerUnavailable` or `ServerRefused` when waiting
    does not help. Each may be repeated.
    """

    def writing(self) -> AbstractContextManager[Write]:
        """Yield a function that stores a payload; all are safe when the block ends."""

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, Frame | None], T]) -> list[T]:
        """Return `decode(i, payload)` of each, with None in place of one that is gone; called as they arrive."""

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """The size of each; 0 where it is gone."""

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads; those that are gone do not matter."""

    def pages(self) -> Iterator[list[PayloadName]]:
        """All payloads of the run, a page at a time. Payloads that come or go during the listing may be missed."""
