"""Lends samples of this worker's groups to other workers, from the offer to the return.

Invariant: a sample is made in one place at a time. A sample is offered only after this worker has released it, and is
made here again only when the buffer reports that it is neither offered nor lent.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from time import monotonic

from rollq.buffer.calls.replies.leases import Offer, Offered
from rollq.buffer.values.rollouts import Sample, SampleStatus
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.groups.leases import HeldLease, LeaseTable, StopReason
from rollq.workers.wake_signals import Signals

GATHER_S = 0.02
"""Samples given up within this many seconds are offered together, so siblings go to one worker."""
OFFER_S = 2.0
"""How many seconds a sample is offered. If no worker takes the sample, it is made here."""
LEAST_REST_S, MOST_REST_S = 10.0, 600.0
"""The shortest and longest pause, in seconds, in a task's offers after an untaken offer. Each further untaken offer
doubles the pause."""


@dataclass(slots=True, eq=False)
class Away:
    """A sample that was given up at `since_s` (monotonic) so that other workers may make it. `back` receives the sample
    when it returns. `parts` is the number of its group's parts in the buffer at the time of the offer, None before the
    offer.
    """

    sample: Sample
    since_s: float
    back: "asyncio.Future[Sample]"
    parts: int | None = None
    is_lent: bool = False


class Loans:
    """Offers samples to other workers, and waits for the samples."""

    def __init__(self, calls: BufferCalls, signals: Signals) -> None:
        self._calls = calls
        self._signals = signals
        self._away: dict[HeldLease, dict[int, Away]] = {}
        self._in_vain: dict[str, int] = {}
        self._rests_until_s: dict[str, float] = {}

    def rests(self, task: str) -> bool:
        """Whether a task pauses its offers because no worker took the last one."""
        return monotonic() < self._rests_until_s.get(task, 0.0)

    @property
    def offered(self) -> int:
        """The number of samples that are offered, or about to be, and not lent yet."""
        return sum(not away.is_lent for samples in self._away.values() for away in samples.values())

    async def lend(self, held: HeldLease, index: int, sample: Sample) -> Sample:
        """Let another worker make the rest of a sample. Returns the sample once it is back, unchanged if no worker took
        it or its group is stopped. After a stop, `held.away` still has the sample's index.
        """
        if held.finished:
            return sample
        away = Away(sample, monotonic(), asyncio.get_running_loop().create_future())
        self._away.setdefault(held, {})[index] = away
        held.away.add(index)
        self._signals.loans.set()
        try:
            sample = await away.back
        finally:
            lent = self._away[held]
            del lent[index]
            if not lent:
                del self._away[held]
        if not held.finished:
            held.away.discard(index)
        if away.is_lent:
            held.staying.add(index)
        return sample

    def let_go(self, held: HeldLease) -> None:
        """Stop waiting for the samples of a stopped group."""
        for away in self._away.get(held, {}).values():
            _end(away, away.sample)

    async def run(self) -> None:
        """Offer samples and fetch returned samples, until cancelled."""
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
            held.offer_calls += any((offer.added, offer.taken_back))
            if answer is None:
                LeaseTable.stop(held, StopReason.GONE)
            elif back := self._note(offer, samples, answer):
                await self._fetch(held, back)

    def _note(self, offer: Offer, samples: Mapping[int, Away], answer: Offered) -> dict[int, Away]:
        """Note which samples have been lent. Returns the samples that are back."""
        task, back = offer.lease.task, {}
        for index, away in samples.items():
            if away.parts is None:
                away.parts = answer.parts
            if index not in answer.offered and index not in offer.taken_back:
                away.is_lent = True
                self._in_vain.pop(task, None)
            if index not in answer.offered and index not in answer.lent:
                back[index] = away
        if any(not away.is_lent for away in back.values()):
            times = self._in_vain[task] = self._in_vain.get(task, 0) + 1
            self._rests_until_s[task] = monotonic() + min(LEAST_REST_S * 2.0 ** (times - 1), MOST_REST_S)
        return back

    async def _fetch(self, held: HeldLease, back: Mapping[int, Away]) -> None:
        """Read the returned samples. If a sample was offered before it started, read only later parts."""
        for after, indices in groupby(sorted(back, key=lambda index: _after(back[index])), lambda i: _after(back[i])):
            samples = await self._calls(self._calls.buffer.kept, held.lease, list(indices), after)
            for index, sample in samples.items():
                _end(back[index], sample)


def _offer(held: HeldLease, samples: Mapping[int, Away], now_s: float) -> Offer:
    added = tuple(index for index, away in samples.items() if away.parts is None)
    late: Iterable[int] = (
        index
        for index, away in samples.items()
        if away.parts is not None and not away.is_lent and now_s - away.since_s >= OFFER_S
    )
    return Offer(held.lease, held.offer_calls, added, tuple(late))


def _after(away: Away) -> int:
    """How many of the group's parts certainly precede this sample's first part; 0 once it has started."""
    return (away.parts or 0) if away.sample.status is SampleStatus.PENDING else 0


def _end(away: Away, sample: Sample) -> None:
    if not away.back.done():
        away.back.set_result(sample)
