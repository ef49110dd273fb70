"""Gives samples of this worker's groups up to workers of the fleet that have less to do."""

from collections.abc import Sequence
from time import monotonic

from rollq.buffer.replies import UnderWay
from rollq.buffer.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.samples import UNFINISHED, SampleMaker
from rollq.workers.groups.spread import (
    AGAIN_S,
    LEAST_RATIO,
    Spare,
    beforehand,
    chosen,
    part_of,
    ratio_elsewhere,
    surplus,
)
from rollq.workers.groups.task_control import TaskControl


class Lender:
    """Looks, at each lease and after each report to the fleet, whether others have less to do."""

    def __init__(
        self,
        calls: BufferCalls,
        table: LeaseTable,
        places: AllPlaces,
        control: TaskControl,
        maker: SampleMaker,
        fleet: FleetShare,
        recipes: dict[str, Recipe],
    ) -> None:
        self._calls = calls
        self._table = table
        self._places = places
        self._control = control
        self._maker = maker
        self._fleet = fleet
        self._recipes = recipes

    def beforehand(self, leases: Sequence[Lease], under_way: UnderWay) -> list[frozenset[int]]:
        """The samples of each of these new leases that are for others, by index; `under_way`: when they were leased."""
        given_up: list[frozenset[int]] = []
        spare = 0
        if leases and 0 < self._fleet.share < 1:
            new = [sum(sample.status in UNFINISHED for sample in lease.samples) for lease in leases]
            part = part_of(under_way, self._fleet.share, len(leases[0].samples))
            open_samples = self._places.open + sum(new)
            gain, sample_s = self._maker.speed.gain(open_samples), self._maker.mean_sample_s
            spare = beforehand(open_samples, part, gain, sample_s)
        for lease in leases:
            unmade = [index for index, sample in enumerate(lease.samples) if sample.status in UNFINISHED]
            mine = unmade[-spare:] if spare > 0 and self._is_lent(lease) else []
            given_up.append(frozenset(mine))
            spare -= len(mine)
        return given_up

    async def look(self) -> None:
        """Give up samples that others would make sooner. Raises `StoreLost`."""
        spare = surplus(self._fleet.fleet, self._fleet.share, self._places.open, self._places.capacity)
        held = [entry for entry in self._table if self._may_lend(entry)]
        if not spare or not held or not self._control.open_tasks:
            return
        under_way = await self._calls.poll(self._calls.buffer.under_way, self._control.open_tasks)
        if under_way.pending:
            return
        for entry in sorted(held, key=lambda entry: entry.placed):
            spare -= self._places.of(entry.lease.task).give_up(entry, spare)
        ratio = ratio_elsewhere(
            self._fleet.fleet, self._maker.speed, self._fleet.counted_tokens_per_s, self._places.taken
        )
        if spare > 0 and ratio >= LEAST_RATIO:
            await self._give_up_running(held, spare)

    def _may_lend(self, held: HeldLease) -> bool:
        return not held.finished and self._is_lent(held.lease)

    def _is_lent(self, lease: Lease) -> bool:
        is_odd = lease.suspect or lease.alone or lease.evaluation or lease.borrowed
        return not is_odd and self._recipes[lease.task].settings.spread == "tail"

    async def _give_up_running(self, held: list[HeldLease], most: int) -> None:
        now_s = monotonic()
        spare = [
            Spare(group, index, entry.kept[index].response_tokens if index in entry.kept else 0)
            for group, entry in enumerate(held)
            if self._can_move(entry)
            for index in entry.requests.values()
            if now_s - entry.given_up_s.get(index, -AGAIN_S) >= AGAIN_S
        ]
        by_group: dict[int, set[int]] = {}
        for one in chosen(spare, most):
            by_group.setdefault(one.group, set()).add(one.sample)
            held[one.group].given_up_s[one.sample] = now_s
        for group, indices in by_group.items():
            await self._maker.give_up(held[group], indices)

    def _can_move(self, held: HeldLease) -> bool:
        """Whether a running sample of a group can be continued by another worker from its tokens."""
        recipe, lease = self._recipes[held.lease.task], held.lease
        return recipe.resumes(lease) and recipe.salvages(lease) and not recipe.records and held.salvages
