"""Prompts that kill whoever samples them, among prompts that do not."""

import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from faults import processes
from faults.processes import BATCH, SETTINGS_FILE, THRESHOLD, Role, write_settings
from faults.stand_ins import StandIns
from rollq.buffer.rollouts import Status
from rollq.buffer.store.server import EmbeddedServer
from rollq.producer.settings import ProducerTask
from support.producer_run import order
from support.waiting import PATIENCE_S, wait_until

RUN = "poison"
WORKERS = 3


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """Deaths of workers, and how many poisonous and other groups failed or were completed."""

    deaths: int
    quarantined: int
    innocents_failed: int
    completed: int


def run_poison(server: EmbeddedServer, folder: Path, poisons: int) -> PoisonOutcome:
    """Have workers sample a run's first groups, `poisons` of which kill them, until all are completed or failed."""
    folder.mkdir()
    write_settings(folder, RUN)
    first = order(ProducerTask(prompts=folder / "math.jsonl", batch_groups=1), BATCH["math"] * THRESHOLD)
    write_settings(folder, RUN, poisoned=[int(prompt.split()[1]) for prompt in first[:poisons]])
    stand_ins = StandIns(server.url, RUN, folder, SETTINGS_FILE)
    with closing(stand_ins.buffer):
        stand_ins.create()
        stand_ins.begin()
        roles = [Role("producer", processes.produce, folder, server.url)]
        roles += [Role(name, processes.work, folder, server.url, name) for name in (f"w{n}" for n in range(WORKERS))]
        groups = sum(BATCH.values()) * THRESHOLD

        def settled() -> bool:
            for role in roles:
                if not role.alive:
                    role.start()
            return stand_ins.count(Status.FAILED) == poisons and stand_ins.count(Status.COMPLETED) == groups

        wait_until(settled)
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
        )
