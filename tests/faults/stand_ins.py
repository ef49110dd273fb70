"""The roles that a scenario does not test, played by hand: they do their part at once, and leave histories too."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faults.history import History
from faults.recording import put_recorded
from rollq.buffer.buffer import Buffer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import (
    FinishReason,
    GroupResult,
    Lease,
    Sample,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from rollq.cli.settings.file import load_settings
from support.buffer_run import World, set_clock, text_of

TOKENS = 4


class StandIns:
    """Admin, trainer, producer, worker and sweeper of the run that a folder's rollq.toml describes."""

    def __init__(self, url: str, run: str, folder: Path, settings_file: str) -> None:
        settings = load_settings(folder / settings_file)
        self.buffer = Buffer.connect(url, run, payloads=settings.payloads)
        self.world = World(self.buffer)
        self.tasks = settings.all_tasks()
        self._folder = folder
        self._random = random.Random(0)

    def create(self, *, max_staleness: int = 1) -> None:
        """Create the run and its tasks."""
        self.buffer.create_run()
        for name, rules in self.tasks.items():
            self.buffer.register_task(name, rules.model_copy(update={"max_staleness": max_staleness}))

    def begin(self, launch_id: str = "first") -> None:
        """Start training at step 0, and let other trainers take the run."""
        history = History(self._folder / "history", "trainer0")
        with history.call("begin", launch=launch_id, from_step=0, mode="replay", weights="initial") as call:
            held = self.buffer.begin_epoch(
                trainer_id="trainer", launch_id=launch_id, from_step=0, mode="replay", uri="", digest="initial"
            )
            call.ok(epoch=held.epoch)
        self.buffer.end_lease(held)
        self.world.held = held

    def complete(self, task: str, groups: int) -> None:
        """Take new prompts all the way to completed."""
        assert self.world.admit(groups, task) == groups
        self.work(task, groups)

    def work(self, task: str, groups: int) -> None:
        """Lease pending groups and put random samples."""
        history = History(self._folder / "history", "worker")
        leases = self.world.lease(groups, task)
        clock = self.buffer.clock(task)
        put_recorded(history, self.buffer.put, [self._result(lease, clock.epoch, clock.version) for lease in leases])

    def _result(self, lease: Lease, epoch: int, version: int) -> GroupResult:
        samples = tuple(self._sample(epoch, version, lease.group_id) for _ in lease.samples)
        return GroupResult(lease, samples)

    def _sample(self, epoch: int, version: int, group_id: int) -> Sample:
        ids = np.array([self._random.randrange(32, 127) for _ in range(TOKENS)], dtype=np.int32)
        logprobs = np.full(TOKENS, -0.5, dtype=np.float32)
        segment = Segment(ids[:2], ids, logprobs, (VersionSpan(epoch, version, TOKENS),))
        return Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, 1.0, text=text_of(group_id))

    def lose_workers(self) -> None:
        """Let every lease run out, as if its worker had died some time ago while others swept all the time."""
        for task in self.tasks:
            keys = task_keys(self.buffer.run, task)
            set_clock(self.buffer, task, reaped_ms=self.buffer.server_ms(), hold_until_ms=0)
            for member in self.members(task, Status.RUNNING):
                self.buffer.client.zadd(keys.status(Status.RUNNING), {member: 1.0})

    def sweep(self) -> None:
        """Take back groups whose leases ran out, and expire what is stale."""
        for task in self.tasks:
            self.buffer.reap(task)
            self.buffer.expire(task)

    def count(self, status: Status) -> int:
        """Groups of a status, over all tasks."""
        return sum(len(self.members(task, status)) for task in self.tasks)

    def members(self, task: str, status: Status) -> Sequence[bytes]:
        """Ids of the groups of a status."""
        client: Any = self.buffer.client
        found: Sequence[bytes] = client.zrange(task_keys(self.buffer.run, task).status(status), 0, -1)
        return found
