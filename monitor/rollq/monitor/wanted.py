"""How many workers a run needs so that its trainer never waits. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rollq.buffer.trainer_state import TrainerState
from rollq.monitor.status import RunStatus, TaskStatus
from rollq.monitor.units import count

LEAST_KEEP_RATE = 0.05
"""A lower keep rate asks for a look at the task, not for more workers."""


def wanted_workers(run: RunStatus) -> int | None:
    """The number of workers with which the trainer would not wait; None while the rates are unknown.

        wanted = ceil(sum over tasks(min(needed, allowed)) / capacity)
        needed = batch_groups / busy_s / keep_rate x worked_s
        allowed = limit - trained

    A trainer that never waits takes `batch_groups` every `busy_s` seconds, its mean time for a step without the wait.
    One of `keep_rate` groups is worth training (at least 0.05), so more are made, and each is with a worker for
    `worked_s` seconds: by Little's law, that many are with workers at a time. The staleness bound allows no more than
    `limit - trained`. `capacity` is the mean `groups_in_flight` of the workers that are alive.

    It is 0 when the trainer has ended, or when no task produces, and else at least 1. It is an estimate: `worked_s` is
    that of the present load.
    """
    tasks = [task for task in run.tasks if task.is_sampled and task.control in ("run", "sleep")]
    if not tasks or (run.trainer and run.trainer.has_ended):
        return 0
    capacity = _capacity(run.alive_workers.values())
    needed = [_groups_with_workers(task, run.trainer) for task in tasks]
    known = [groups for groups in needed if groups is not None]
    if capacity is None or len(known) < len(needed):
        return None
    return max(1, math.ceil(sum(known) / capacity - 1e-9))


def workers_in_words(run: RunStatus) -> str:
    """The workers that are alive, and how many are wanted."""
    alive, wanted = len(run.alive_workers), wanted_workers(run)
    if wanted is None:
        return count(alive, "worker") + ("" if alive else " (1 or more wanted)")
    return f"{count(alive, 'worker')} ({wanted} wanted)" if wanted else f"{count(alive, 'worker')}, nothing to make now"


def _groups_with_workers(task: TaskStatus, trainer: TrainerState | None) -> float | None:
    if trainer is None or not trainer.busy_s or task.rates is None or task.rates.worked_s is None:
        return None
    keep_rate = max(LEAST_KEEP_RATE, task.kept / task.outcomes) if task.outcomes else 1.0
    needed = task.batch_groups / trainer.busy_s / keep_rate * task.rates.worked_s
    return min(needed, task.limit - task.trained)


def _capacity(reports: Iterable[Mapping[str, Any]]) -> float | None:
    capacities = [report["capacity"] for report in reports if "capacity" in report]
    return sum(capacities) / len(capacities) if capacities else None
