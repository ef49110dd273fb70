"""Gives samples of this worker's groups up to workers of the fleet that have less to do."""

from time import monotonic

from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.samples import SampleMaker
from rollq.workers.groups.spread import AGAIN_S, LEAST_RATIO, Spare, chosen, ratio_elsewhere, surplus
from rollq.workers.groups.task_control import TaskControl


class Lender:
    """Looks, after each report to the fleet, whether others have less to do."""

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

    async def look(self) -> None:
        """Give samples up, if that pays. Raises `StoreLost`."""
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
        lease = held.lease
        is_odd = lease.suspect or lease.alone or lease.evaluation or lease.borrowed
        return not (is_odd or held.finished) and self._recipes[lease.task].settings.spread == "tail"

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
