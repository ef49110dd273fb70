"""When a batch is cut off, ends its groups with their finished samples, if they have enough.

A group with too few finished samples keeps them, leaves its batch, and continues later. Two kinds of groups are not
stopped: an evaluation's groups with too few finished samples, which would start again as a whole, and groups whose
samples have all ended.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus
from rollq.workers.groups.filters import ENDED, have_ended, is_enough
from rollq.workers.groups.leases import HeldLease, LeaseTable, StopReason
from rollq.workers.groups.recipes import Recipe
from rollq.workers.wake_signals import Signals

LEFT_OUT: Final = Sample((), SampleStatus.FAILED, FinishReason.ABORT, error="its batch was cut off")
"""Replaces a sample that did not finish in time. It cannot be trained, but is not a failure."""


def without_the_rest(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a group that ends with its batch, with `LEFT_OUT` in place of unfinished samples."""
    return [sample if sample.status in ENDED else LEFT_OUT for sample in samples]


class CutOff:
    """Ends the groups of batches that are cut off."""

    def __init__(self, table: LeaseTable, recipes: Mapping[str, Recipe], signals: Signals) -> None:
        self._table = table
        self._recipes = recipes
        self._signals = signals

    async def run(self) -> None:
        """Check the held groups until cancelled, and stop groups that must end."""
        while True:
            for held in self._table:
                if held.cut_off and self._must_end(held):
                    self._table.stop(held, StopReason.BATCH_OVER)
            await self._signals.cut_off.wait()

    def _must_end(self, held: HeldLease) -> bool:
        if have_ended(held.made):
            return False  # it is being filtered or put
        return not held.lease.evaluation or is_enough(held.made, self._recipes[held.lease.task].min_valid_samples)
