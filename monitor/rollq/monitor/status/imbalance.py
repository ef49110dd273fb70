"""Detects idle workers while others hold most groups, and describes them. Pure.

Workers are idle at the end of a batch because few groups are left, and just after its start because they are about to
take groups. Neither is reported: most of the batch must remain, and a worker must have been idle for a while.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.read import IDLE, SERVING, RunStatus, groups_in
from rollq.monitor.text.units import count

LEAST_IDLE_S = 5.0
LEAST_PART = 0.5
"""More than this share of a batch must be under way."""
OVERLOADED = 1.5
"""A worker with at least this multiple of an even share of groups holds too many."""
MOST_NAMED = 2


def _awaited(run: RunStatus) -> int:
    """The number of groups pending or with a worker, if they are a large part of the batch that the trainer waits
    for."""
    tasks = [task for task in run.tasks if task.is_sampled and task.control == "run"]
    under_way, batch = groups_in(tasks, Status.PENDING, Status.RUNNING), sum(task.batch_groups for task in tasks)
    return under_way if run.is_trainer_waiting and under_way > LEAST_PART * batch else 0


def imbalance(run: RunStatus) -> str:
    """A sentence if the trainer waits and workers are idle while others hold most groups; otherwise empty."""
    under_way = _awaited(run)
    serving = {name: report for name, report in run.alive_workers.items() if report.get("state") in (SERVING, IDLE)}
    idle = sum(map(_is_idle, serving.values()))
    if not under_way or not idle:
        return ""
    held = {name: _in_flight(report) for name, report in serving.items()}
    holders = _holders(held, max(2.0, OVERLOADED * under_way / len(serving)))
    return _sentence(held, holders, idle, under_way) if holders else ""


def _holders(held: Mapping[str, int], enough: float) -> list[str]:
    """The workers with at least `enough` groups, most groups first."""
    return sorted((name for name in held if held[name] >= enough), key=lambda name: (-held[name], name))


def _is_idle(report: Mapping[str, Any]) -> bool:
    return not _in_flight(report) and (report.get("idle_s") or 0.0) >= LEAST_IDLE_S


def _in_flight(report: Mapping[str, Any]) -> int:
    return int(report.get("in_flight") or 0)


def _sentence(held: Mapping[str, int], holders: Sequence[str], idle: int, under_way: int) -> str:
    who = " and ".join(holders) if len(holders) <= MOST_NAMED else count(len(holders), "worker")
    verb = "holds" if len(holders) == 1 else "hold"
    holding = sum(held[name] for name in holders)
    return f"{idle} of {count(len(held), 'worker')} idle while {who} {verb} {holding} of {under_way} groups"
