"""Why a batch does not fill, and whether it ever will. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from rollq.buffer.replies import Control, Counts, Shortfall
from rollq.buffer.rollouts import Status

FULL = 0.8
"""Producers admit nothing new from this share of maxmemory on."""


class Outlook(StrEnum):
    """What becomes of a step whose batch is short."""

    WAIT = "wait"  # it may fill
    SYNC_FIRST = "sync first"  # the live weights are too old for it: newer ones were trained, and not published
    STALLED = "stalled"  # nothing is under way, and a full server admits nothing
    STOPPED = "stopped"  # production was stopped, and nothing under way can fill it
    DONE = "done"  # a task's own hook ended its production, and nothing under way can fill it


def outlook(shortfall: Shortfall, counts: Iterable[Counts], memory_fraction: float) -> Outlook:
    """What becomes of the step. `counts`: of the tasks of the batch; `memory_fraction`: used share of maxmemory.

    Weights are too old when no group made by them may be trained at the step: then nothing that is under way can help.
    A trainer that has trained the step before it has newer ones, since a version is a trained step. A full server
    frees nothing while its trainer waits.
    """
    short = [count for count in counts if count.task in shortfall.wanted]
    if any(shortfall.step - count.clock.version - 1 >= count.clock.rules.stale_threshold for count in short):
        return Outlook.SYNC_FIRST
    for count in short:
        if shortfall.ready[count.task] >= shortfall.wanted[count.task]:
            continue  # it only waits for stragglers
        running = count.statuses.get(Status.RUNNING, 0)
        if count.clock.control is Control.STOPPED and not running:
            return Outlook.STOPPED
        if running or count.statuses.get(Status.PENDING, 0):
            continue
        if count.clock.control is Control.DONE:
            return Outlook.DONE
        if memory_fraction >= FULL:
            return Outlook.STALLED
    return Outlook.WAIT


def explain_wait(shortfall: Shortfall, counts: Sequence[Counts], workers: int, memory_fraction: float = 0.0) -> str:
    """What holds the batch back, with every task's counts by status.

    `workers`: how many are alive. `memory_fraction`: used share of the server's maxmemory.
    """
    lines = [_describe(shortfall, count, workers) for count in counts]
    if memory_fraction >= FULL:
        lines.append(
            f"  the server's memory is full to {memory_fraction:.0%} of maxmemory, and nothing new is admitted: raise "
            "maxmemory, take smaller batches, or checkpoint more often"
        )
    return f"no batch for step {shortfall.step}:\n" + "\n".join(lines)


def _describe(shortfall: Shortfall, counts: Counts, workers: int) -> str:
    statuses = ", ".join(f"{status.value} {number}" for status, number in counts.statuses.items() if number)
    shown = f"  task {counts.task!r}: {statuses or 'nothing scheduled'}"
    if counts.task not in shortfall.wanted:
        return f"{shown}; it has enough"
    wanted, ready = shortfall.wanted[counts.task], shortfall.ready[counts.task]
    return f"{shown}; {ready} of {wanted} ready: {_reason(shortfall, counts, workers)}"


def _reason(shortfall: Shortfall, counts: Counts, workers: int) -> str:
    clock = counts.clock
    pending, running = counts.statuses.get(Status.PENDING, 0), counts.statuses.get(Status.RUNNING, 0)
    if clock.control is Control.PAUSE:
        return "production is set to pause (`rollq resume`)"
    if clock.control is not Control.RUN:
        return f"production is set to {clock.control.value}: {clock.control_reason}"
    if shortfall.step - clock.version - 1 >= clock.rules.stale_threshold:
        return f"the live weights, version {clock.version}, are too old for it: publish newer ones"
    if late := shortfall.stragglers.get(counts.task, 0):
        return f"waiting for {late} groups in generation that would be too old at the next step"
    if running:
        return f"{workers} workers are generating"
    if pending:
        return "no worker takes the pending groups" + ("" if workers else ", none is alive (`rollq work`)")
    return "nothing is scheduled: is a producer running (`rollq produce`), and does its prompt file hold prompts?"
