"""Detects idle workers while others hold most of the groups, as text. Pure.

Workers are idle at the end of a batch because few groups are left, and just after its start because they are about to
take some. Neither is reported: most of the batch must remain, and a worker must have been idle for a while.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.monitor.status.read import IDLE, SERVING, RunStatus
from rollq.monitor.text.units import count

LEAST_IDLE_S = 5.0
LEAST_PART = 0.5
"""More than this share of a batch must be under way."""
OVERLOADED = 1.5
"""A worker with at least this multiple of an even share of the groups holds too many."""
MOST_NAMED = 2


def _awaited(run: RunStatus) -> int:
    """Groups that are pending or with a worker, if they are a large part of the batch that the trainer waits for."""
    tasks = [task for task in run.tasks if task.is_sampled and task.control == "run"]
    under_way = sum(task.groups(status) for task in tasks for status in (Status.PENDING, Status.RUNNING))
    is_waiting = run.trainer is not None and run.trainer.phase is TrainerPhase.WAITING
    return under_way if is_waiting and under_way > LEAST_PART * sum(task.batch_groups for task in tasks) else 0


def imbalance(run: RunStatus) -> str:
    """A sentence if the trainer waits and workers are idle while others hold most groups; otherwise empty."""
    under_way = _awaited(run)
    if not under_way:
        return ""
    serving = {name: report for name, report in run.alive_workers.items() if report.get("state") in (SERVING, IDLE)}
    idle = sum(map(_is_idle, serving.values()))
    if not idle:
        return ""
    held = {name: int(report.get("in_flight") or 0) for name, report in serving.items()}
    enough = max(2.0, OVERLOADED * under_way / len(serving))
    holders = sorted((name for name in held if held[name] >= enough), key=lambda name: (-held[name], name))
    return _sentence(held, holders, idle, under_way) if holders else ""


def _is_idle(report: Mapping[str, Any]) -> bool:
    return not report.get("in_flight") and (report.get("idle_s") or 0.0) >= LEAST_IDLE_S


def _sentence(held: Mapping[str, int], holders: Sequence[str], idle: int, under_way: int) -> str:
    who = " and ".join(holders) if len(holders) <= MOST_NAMED else count(len(holders), "worker")
    verb = "holds" if len(holders) == 1 else "hold"
    holding = sum(held[name] for name in holders)
    return f"{idle} of {count(len(held), 'worker')} idle while {who} {verb} {holding} of {under_way} groups"
