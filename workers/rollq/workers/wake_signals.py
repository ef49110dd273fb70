"""Signals between the parts of one worker.

Invariant: a signal only saves waiting. Each part also looks by itself every `POLL_S`, so a lost signal costs a moment.
"""

import asyncio
from contextlib import suppress

POLL_S = 1.0
"""How often a part looks without a signal."""
REST_S = 0.05
"""Minimum pause between two reactions to wake-ups from Redis."""
OFFERS_REST_S = 0.1
"""The same for offers of samples, which wake all idle workers."""


class Signal:
    """One reason to look again, for one waiting part."""

    def __init__(self, rest_s: float = 0.0) -> None:
        """`rest_s`: minimum pause before each wait."""
        self._event = asyncio.Event()
        self._rest_s = rest_s

    def set(self) -> None:
        """Wake the waiting part, or have its next wait end at once."""
        self._event.set()

    async def wait(self, most_s: float = POLL_S) -> bool:
        """Wait until the signal has been set since the last wait, for at most `most_s`; returns whether it was."""
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
        """Whether a batch has ended, or is cut off: for the renewal of leases."""
        self.cut_off = Signal()
        """Whether held groups are of a batch that is cut off: for what ends them."""
        self.room = Signal()
        """Whether groups may be leased: for the intake."""
        self.loans = Signal(REST_S)
        """Whether samples that were lent are back: for the loans."""
        self.offers = Signal(OFFERS_REST_S)
        """Whether other workers offer samples: for the borrower."""
        self.state = Signal()
        """The state that monitors see: for the report."""
