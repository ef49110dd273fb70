"""Samples of this worker's groups that other workers make, from their offer until they are back.

Invariant: a sample is made in one place at a time. It is offered only after this worker has let go of it, and made here
again only when the buffer says that it is neither offered nor lent.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from rollq.buffer.replies import Offer, Offered
from rollq.buffer.rollouts import Sample
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.groups.leases import HeldLease
from rollq.workers.signals import Signals

GATHER_S = 0.02
"""Samples that are given up at about the same time are offered together, so that one worker gets siblings."""
OFFER_S = 2.0
"""How long a sample is offered: when no worker has taken it by then, it is made here."""


@dataclass(slots=True, eq=False)
class Away:
    """A sample that is for others to make since `since_s` (monotonic). `back` gets it, as it is then."""

    sample: Sample
    since_s: float
    back: "asyncio.Future[Sample]"
    is_offered: bool = False
    is_lent: bool = False


class Loans:
    """Offers samples to other workers, and waits for them."""

    def __init__(self, calls: BufferCalls, signals: Signals) -> None:
        self._calls = calls
        self._signals = signals
        self._away: dict[HeldLease, dict[int, Away]] = {}

    async def lend(self, held: HeldLease, index: int, sample: Sample) -> Sample:
        """Have another worker make the rest of a sample; returns it as it is when it is this worker's again: as it was
        when no worker wanted it, or when its group is stopped."""
        if held.finished:
            return sample
        away = Away(sample, monotonic(), asyncio.get_running_loop().create_future())
        self._away.setdefault(held, {})[index] = away
        self._signals.loans.set()
        try:
            return await away.back
        finally:
            mine = self._away.get(held, {})
            mine.pop(index, None)
            if not mine:
                self._away.pop(held, None)

    def let_go(self, held: HeldLease) -> None:
        """Wait for the samples of a stopped group no longer."""
        for away in self._away.get(held, {}).values():
            _end(away, away.sample)

    async def run(self) -> None:
        """Offer samples and fetch those that are back, until cancelled."""
        while True:
            if self._away:
                await asyncio.sleep(GATHER_S)
                await self._look()
            await self._signals.loans.wait()

    async def _look(self) -> None:
        chosen = {held: dict(samples) for held, samples in self._away.items() if not held.finished}
        offers = [_offer(held, samples, monotonic()) for held, samples in chosen.items()]
        answers = await self._calls(self._calls.buffer.offer, offers)
        for offer, answer, (held, samples) in zip(offers, answers, chosen.items(), strict=True):
            if offer.added or offer.taken_back:
                held.offer_calls += 1
            if answer is None:
                self.let_go(held)
                continue
            back = self._note(samples, answer)
            if back:
                kept = await self._calls(self._calls.buffer.kept, held.lease)
                for index, away in back.items():
                    _end(away, kept[index])

    def _note(self, samples: Mapping[int, Away], answer: Offered) -> dict[int, Away]:
        """Note which samples are lent; returns those that are back."""
        back = {}
        for index, away in samples.items():
            away.is_offered = True
            away.is_lent = index in answer.lent
            if index not in answer.lent and index not in answer.offered:
                back[index] = away
        return back


def _offer(held: HeldLease, samples: Mapping[int, Away], now_s: float) -> Offer:
    added = tuple(index for index, away in samples.items() if not away.is_offered)
    late = (
        index
        for index, away in samples.items()
        if away.is_offered and not away.is_lent and now_s - away.since_s >= OFFER_S
    )
    return Offer(held.lease, held.offer_calls, added, tuple(late))


def _end(away: Away, sample: Sample) -> None:
    if not away.back.done():
        away.back.set_result(sample)
