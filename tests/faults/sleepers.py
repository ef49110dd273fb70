"""Roles that sleep while their run is deleted, and wake up when it is gone, or is there again."""

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import StaleWorker, StoreLost
from rollq.buffer.values.rollouts import GroupResult, Lease, SamplePart
from support.buffer_run import OUTSIDE_BYTES, World, make_sample


class Sleepers:
    """A worker, which holds a group of a task if it gets one, and the trainer, if there is one."""

    def __init__(self, url: str, world: World, task: str, trainer: TrainerEpoch | None) -> None:
        self._buffer, self._trainer = Buffer.connect(url, world.buffer.run), trainer
        self._buffer.counts(task)  # it knows the run
        self._leases: tuple[Lease, ...] = ()
        if live := self._buffer.live_model():
            world.admit(1, task)
            try:
                self._leases = self._buffer.lease(
                    [task], 1, worker="sleeper", version=live.version, epoch=live.epoch
                ).leases
            except StaleWorker:
                return

    def wake(self) -> None:
        """Try everything, with large frames: all of it is refused."""
        if self._trainer:
            with pytest.raises(StoreLost):
                self._buffer.commit(self._trainer, 1)
        sample = make_sample(0, text="z" * OUTSIDE_BYTES)
        for lease in self._leases:
            with pytest.raises(StoreLost):
                self._buffer.renew([lease])
            with pytest.raises(StoreLost):
                self._buffer.salvage([SamplePart(lease, 0, 0, 0, sample)])
            with pytest.raises(StoreLost):
                self._buffer.put([GroupResult(lease, (sample,) * 2)])

    def close(self) -> None:
        """Close the connection."""
        self._buffer.close()
