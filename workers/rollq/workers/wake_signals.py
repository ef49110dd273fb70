"""Signals between the parts of one worker.

Invariant: a signal only shortens a wait. Each part also checks every `POLL_S`, so a lost signal costs only a moment.
"""

import asyncio
from contextlib import suppress

POLL_S = 1.0
"""The seconds between a part's checks without a signal."""
REST_S = 0.05
"""The minimum seconds between two reactions to wake-ups from Redis."""
OFFERS_REST_S = 0.1
"""The minimum seconds between two reactions to sample offers, which wake all idle workers."""


class Signal:
    """A reason for one waiting part to check again."""

    def __init__(self, rest_s: float = 0.0) -> None:
        """`rest_s` is the minimum pause before each wait."""
        self._event = asyncio.Event()
        self._rest_s = rest_s

    def set(self) -> None:
        """Wake the waiting part, or make its next wait end immediately."""
        self._event.set()

    async def wait(self, most_s: float = POLL_S) -> bool:
        """Wait until the signal is set, for at most `most_s`. A signal that was set since the last wait counts. Returns
        whether the signal was set."""
        if self._rest_s:
            await asyncio.sleep(self._rest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._event.wait()
        was_set = self._event.is_set()
        self._event.clear()
        return was_set


class Signals:
    """All signals of a worker, each named after what may have changed."""

    def __init__(self) -> None:
        self.weights = Signal(REST_S)
        """The published weights: for the weight follower."""
        self.control = Signal(REST_S)
        """The control of the tasks, or whether groups are in flight: for the task control."""
        self.batches = Signal(REST_S)
        """Whether a batch has ended or is cut off: for the renewal of leases."""
        self.cut_off = Signal()
        """Whether a held group's batch is cut off: for the end of such groups."""
        self.room = Signal()
        """Whether groups may be leased: for the intake."""
        self.loans = Signal(REST_S)
        """Whether lent samples are back: for the loans."""
        self.offers = Signal(OFFERS_REST_S)
        """Whether other workers offer samples: for the borrower."""
        self.state = Signal()
        """The state that monitors see: for the report."""
