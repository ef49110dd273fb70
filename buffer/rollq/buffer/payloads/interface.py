"""External payloads: large frames that neither are in their task's slot nor pass through the task's functions.

No transaction covers both such a payload and the group that names it, so every intermediate state is safe:

- A worker writes the payload under a new name, which contains the lease's nonce. Then it puts the group, which names
  the payload. The lease records that such a payload may exist.
- The function that drops a payload from a group adds its name to the task's garbage. Any role removes the payload, and
  then the name from the garbage. Both are safe to repeat, because names are never reused.
- A worker that dies, or whose lease runs out, leaves payloads that no group ever named. An audit finds these: see
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
"""The same pattern as `AWAY_NAME` in `lua/common/samples.lua`."""


class PayloadName(NamedTuple):
    """A payload's name. It names the store that has the payload, and the group that the payload belongs to. `leaf`
    consists of the lease's nonce and a suffix."""

    task: str
    place: str
    group_id: int
    leaf: str

    @classmethod
    def new(cls, task: str, place: str, group_id: int, nonce: str) -> Self:
        """Make a name that was never used."""
        return cls(task, place, group_id, f"{nonce}-{secrets.token_hex(4)}")

    @classmethod
    def parse(cls, task: str, text: str) -> Self | None:
        """Parse a name made by `encoded`; None for a payload in the task's slot, or for no payload."""
        matched = NAME.fullmatch(text)
        return matched and cls(task, matched[1], int(matched[2]), matched[3])

    @property
    def encoded(self) -> str:
        """The name without the task."""
        return f"{self.place}:{self.group_id}:{self.leaf}"


Write = Callable[[PayloadName, bytes | Pieces], None]


class PayloadStore(Protocol):
    """A payload store. Thread-safe. Every method waits for an unavailable store, and raises `ServerUnavailable` or
    `ServerRefused` when waiting does not help. All methods are safe to repeat.
    """

    def writing(self) -> AbstractContextManager[Write]:
        """Yield a function that stores a payload; all are stored when the block ends."""

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, Frame | None], T]) -> list[T]:
        """Return `decode(i, payload)` for each payload, with None in place of a payload that is gone. Calls `decode` as
        payloads arrive."""

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """Each payload's size; 0 if the payload is gone."""

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads; missing ones are ignored."""

    def pages(self) -> Iterator[list[PayloadName]]:
        """All the run's payloads, a page at a time. Payloads that come or go during the listing may be missed."""
