"""Slots that limit the running calls to a user-written function. Calls that hang keep their slots until they end.

Invariant: no call waits for a slot while calls that hang hold all slots.
"""

import asyncio
from collections import deque

from rollq.buffer.errors import RollqError

HANGS_S = 10.0
"""An abandoned call counts as hanging after this many seconds at the earliest."""


class CallsHang(RollqError):
    """Calls that should have ended long ago hold all slots."""


class CallSlots:
    """Slots for `count` calls, for use on one event loop."""

    def __init__(self, count: int) -> None:
        self.hanging = 0
        self._count = count
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, limit_s: float | None) -> "CallSlot":
        """Wait for a slot, for a call that may take `limit_s`. Raises `CallsHang`."""
        while self._taken >= self._count:
            if self.hanging >= self._count:
                raise CallsHang(f"{self.hanging} earlier calls hang, the most that run at the same time")
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)
                raise
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        self._taken += 1
        return CallSlot(self, limit_s)

    def give_back(self) -> None:
        """Give an ended call's slot to another call."""
        self._taken -= 1
        self._wake(1)

    def note_hanging(self) -> None:
        """Note that a call hangs. Calls that wait for a slot fail once hanging calls hold all slots."""
        self.hanging += 1
        if self.hanging >= self._count:
            self._wake(len(self._waiting))

    def _wake(self, count: int) -> None:
        while self._waiting and count:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1


class CallSlot:
    """One call's slot. `release` it when the call has ended, and `leave` it when nobody waits for the call."""

    def __init__(self, slots: CallSlots, limit_s: float | None) -> None:
        self._slots = slots
        self._limit_s = limit_s
        self._ended = self._hangs = False

    def release(self) -> None:
        """Free the slot after the call has ended."""
        self._ended = True
        self._slots.hanging -= self._hangs
        self._slots.give_back()

    def leave(self) -> None:
        """Note that nobody waits for the call. If the call runs for another `limit_s`, and for at least `HANGS_S`, it
        counts as hanging."""
        if not self._ended:
            asyncio.get_running_loop().call_later(max(self._limit_s or 0.0, HANGS_S), self._hang)

    def _hang(self) -> None:
        if not self._ended and not self._hangs:
            self._hangs = True
            self._slots.note_hanging()
