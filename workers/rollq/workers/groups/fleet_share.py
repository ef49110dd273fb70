"""This worker's share of its fleet's work, in proportion to workers' capacities.

Invariant: this worker takes no group before it has reported to the fleet, and a worker that takes no groups has no
share.
"""

from rollq.buffer.calls.orders import Fleet
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.groups.fair_share import counted_speed, share_of
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.sample_maker import SampleMaker
from rollq.workers.groups.task_control import TaskControl


class FleetShare:
    """Reports this worker's capacity to the fleet, and keeps the answer."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        control: TaskControl,
        places: AllPlaces,
        maker: SampleMaker,
        *,
        worker: str,
    ) -> None:
        self.share = 0.0
        """This worker's share of all work; 0.0 while it takes none."""
        self.tokens_per_s = 0.0
        """This worker's speed at the fleet's mean number of samples; 0.0 while unknown."""
        self.fleet = Fleet()
        """The last report of all workers' places, speed and work."""
        self.counted_tokens_per_s = 0.0
        """The speed that the fleet counts for this worker."""
        self._calls = calls
        self._host = host
        self._control = control
        self._places = places
        self._maker = maker
        self._worker = worker
        self.draining = False

    @property
    def gain(self) -> float:
        """The speed that this worker would gain from more samples now; see `EngineSpeed.gain`."""
        return self._maker.speed.gain(self._places.open)

    async def leave(self) -> None:
        """Stop taking groups. The other workers divide this worker's share."""
        self.share = 0.0
        await self._calls(self._calls.buffer.join_fleet, self._worker, 0, load=0.0, tokens_per_s=0.0)

    async def refresh(self) -> None:
        """Report to the fleet and update the share. Raises `StoreLost`."""
        takes_groups = bool(self._control.open_tasks) and self._host.ready and not self.draining
        places = self._places.capacity if takes_groups else 0
        speed = self._maker.speed
        load = speed.mean_sequences
        self.tokens_per_s = speed.tokens_per_s(self.fleet.mean_load or load)
        counted = float(round(counted_speed(self.fleet, places, self.tokens_per_s)))  # as counted by the fleet
        self.fleet = await self._calls.poll(
            self._calls.buffer.join_fleet,
            self._worker,
            places,
            load=load,
            tokens_per_s=counted,
            open_samples=self._places.open,
        )
        self.counted_tokens_per_s = counted
        self.share = share_of(self.fleet, places, counted) if takes_groups else 0.0
