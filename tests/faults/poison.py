"""Prompts that kill whoever samples them, among prompts that do not."""

import signal
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from faults import processes
from faults.processes import BATCH, SETTINGS_FILE, Load, Role, write_settings
from faults.stand_ins import StandIns
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Status
from rollq.producer.settings import ProducerTask
from support.producer_run import order
from support.waiting import PATIENCE_S, wait_until

RUN = "poison"
WORKERS = 8
STEPS = 333
"""Steps for which prompts are admitted: about 45 seconds of work."""
LOAD = Load(lengths=(100, 150, 200, 250, 300))


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """Deaths of workers, how many poisonous and other groups failed or were completed, and how long it took."""

    deaths: int
    quarantined: int
    innocents_failed: int
    completed: int
    seconds: float

    @property
    def groups_per_s(self) -> float:
        """Completed groups per second."""
        return self.completed / self.seconds


def run_poison(
    server: EmbeddedServer,
    folder: Path,
    poisons: int,
    *,
    load: Load = LOAD,
    steps: int = STEPS,
    workers: int = WORKERS,
) -> PoisonOutcome:
    """Have workers sample the groups of `steps`, `poisons` of which kill them, until all are completed or failed."""
    folder.mkdir()
    load = replace(load, max_staleness=steps - 1)
    write_settings(folder, RUN)
    first = order(ProducerTask(prompts=folder / "math.jsonl", batch_groups=1), BATCH["math"] * steps)
    poisoned = [int(prompt.split()[1]) for prompt in first[:: len(first) // (poisons + 1)][1 : poisons + 1]]
    write_settings(folder, RUN, load, poisoned=poisoned)
    stand_ins = StandIns(server.url, RUN, folder, SETTINGS_FILE)
    with closing(stand_ins.buffer):
        stand_ins.create(max_staleness=load.max_staleness)
        stand_ins.begin()
        roles = [Role("producer", processes.produce, folder, server.url)]
        roles += [Role(name, processes.work, folder, server.url, name) for name in (f"w{n}" for n in range(workers))]
        groups = sum(BATCH.values()) * steps
        began_s = time.monotonic()

        def settled() -> bool:
            for role in roles:
                if not role.alive:
                    role.start()
            return stand_ins.count(Status.FAILED) >= poisons and stand_ins.count(Status.COMPLETED) == groups

        try:
            wait_until(settled)
            seconds = time.monotonic() - began_s
        finally:
            for role in roles:
                role.send(signal.SIGKILL)
                role.wait(PATIENCE_S)
        failed = [stand_ins.buffer.inspect("math", int(member)) for member in stand_ins.members("math", Status.FAILED)]
        quarantined = sum("poison" in str(group["prompt"]) for group in failed)
        return PoisonOutcome(
            deaths=sum(role.starts - 1 for role in roles),
            quarantined=quarantined,
            innocents_failed=stand_ins.count(Status.FAILED) - quarantined,
            completed=stand_ins.count(Status.COMPLETED),
            seconds=seconds,
        )
