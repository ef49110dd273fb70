"""Lends samples of this worker's groups to other workers that have less work."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from rollq.buffer.values.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.loans import Loans
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.sample_maker import UNFINISHED, SampleMaker
from rollq.workers.groups.spread import (
    FEW_GROUPS,
    LEAST_RATIO,
    MOST_KEPT_TOKENS,
    Spare,
    beforehand,
    chosen,
    may_pay,
    part_of,
    ratio_elsewhere,
    surplus,
)
from rollq.workers.groups.task_control import TaskControl


class Lender:
    """Checks at each lease and after each report to the fleet whether other workers have less work."""

    def __init__(
        self,
        calls: BufferCalls,
        table: LeaseTable,
        places: AllPlaces,
        control: TaskControl,
        maker: SampleMaker,
        loans: Loans,
        fleet: FleetShare,
        recipes: Mapping[str, Recipe],
    ) -> None:
        self._calls = calls
        self._table = table
        self._places = places
        self._control = control
        self._maker = maker
        self._loans = loans
        self._fleet = fleet
        self._recipes = recipes

    async def beforehand(self, leases: Sequence[Lease]) -> list[frozenset[int]]:
        """For each of these new leases, the indices of samples for other workers. Raises `StoreLost`."""
        given_up: dict[int, frozenset[int]] = {}
        few = 0 < len(leases) <= FEW_GROUPS - len(self._table)
        gain = self._maker.speed.gain(self._places.open + sum(len(lease.samples) for lease in leases))
        if few and 0 < self._fleet.share < 1 and may_pay(gain, self._maker.mean_sample_s):
            for task in dict.fromkeys(lease.task for lease in leases):
                lendable = {at: lease for at, lease in enumerate(leases) if lease.task == task and self._is_lent(lease)}
                given_up |= await self._beyond_part(task, lendable)
        return [given_up.get(at, frozenset()) for at in range(len(leases))]

    async def _beyond_part(self, task: str, leases: Mapping[int, Lease]) -> dict[int, frozenset[int]]:
        with self._table.expecting():
            under_way = await self._calls(self._calls.buffer.under_way, [task])
        unmade = {
            at: [index for index, sample in enumerate(lease.samples) if sample.status in UNFINISHED]
            for at, lease in leases.items()
        }
        open_samples = sum(map(len, unmade.values())) + sum(
            held.open for held in self._table if held.lease.task == task
        )
        spare = beforehand(open_samples, part_of(under_way, self._fleet.share, self._places.group_size(task)))
        given_up = {}
        for at, indices in unmade.items():
            given_up[at] = frozenset(indices[-spare:] if spare > 0 else ())
            spare -= len(given_up[at])
        return given_up

    async def look(self) -> None:
        """Give up samples that other workers would make sooner. Raises `StoreLost`."""
        fleet = self._fleet.fleet
        spare = surplus(fleet, self._fleet.share, self._places.open, self._places.capacity) - self._loans.offered
        held = list(filter(self._may_lend, self._table))
        if spare <= 0 or not held or not self._control.open_tasks:
            return
        under_way = await self._calls.poll(self._calls.buffer.under_way, self._control.open_tasks)
        if under_way.pending:
            return
        for entry in sorted(held, key=attrgetter("placed")):
            spare -= self._places.of(entry.lease.task).give_up(entry, spare)
        ratio = ratio_elsewhere(fleet, self._maker.speed, self._fleet.counted_tokens_per_s, self._places.taken)
        if spare > 0 and ratio >= LEAST_RATIO:
            await self._give_up_running(list(filter(self._can_move, held)), spare)

    def _may_lend(self, held: HeldLease) -> bool:
        return not held.finished and self._is_lent(held.lease)

    def _is_lent(self, lease: Lease) -> bool:
        is_odd = lease.suspect or lease.alone or lease.evaluation or lease.borrowed
        return not is_odd and self._recipes[lease.task].settings.spread == "tail" and not self._loans.rests(lease.task)

    async def _give_up_running(self, held: Sequence[HeldLease], most: int) -> None:
        spare = [
            Spare(group, index, entry.kept[index].response_tokens if index in entry.kept else 0)
            for group, entry in enumerate(held)
            for index in entry.requests.values()
            if index not in entry.staying
        ]
        by_group: dict[HeldLease, set[int]] = {}
        for picked in chosen(spare, most):
            by_group.setdefault(held[picked.group], set()).add(picked.sample)
        await self._maker.give_up(by_group)

    def _can_move(self, held: HeldLease) -> bool:
        """Whether another worker can continue a running sample of a group from its tokens."""
        recipe, lease = self._recipes[held.lease.task], held.lease
        can_continue = recipe.resumes(lease) and recipe.salvages(lease) and not recipe.records and held.salvages
        return can_continue and sum(sample.response_tokens for sample in held.kept.values()) <= MOST_KEPT_TOKENS
