"""Why a batch does not fill: one line per task for the error that ends the wait. Pure."""

from collections.abc import Iterable

from rollq.buffer.schema import Status
from rollq.buffer.values import Control, Counts, Shortfall


def explain_wait(shortfall: Shortfall, counts: Iterable[Counts], workers: int) -> str:
    """What holds the batch back, with every task's counts by status. `workers`: how many are alive."""
    lines = [_describe(shortfall, count, workers) for count in counts]
    return f"no batch for step {shortfall.step}:\n" + "\n".join(lines)


def _describe(shortfall: Shortfall, counts: Counts, workers: int) -> str:
    statuses = ", ".join(f"{status.value} {number}" for status, number in counts.statuses.items() if number)
    shown = f"  task {counts.task!r}: {statuses or 'nothing scheduled'}"
    if counts.task not in shortfall.wanted:
        return f"{shown}; it has enough"
    wanted, ready = shortfall.wanted[counts.task], shortfall.ready[counts.task]
    return f"{shown}; {ready} of {wanted} ready: {_reason(shortfall.step, counts, workers)}"


def _reason(step: int, counts: Counts, workers: int) -> str:
    clock = counts.clock
    pending, running = counts.statuses.get(Status.PENDING, 0), counts.statuses.get(Status.RUNNING, 0)
    if clock.control is not Control.RUN:
        return f"production is set to {clock.control.value} (`rollq resume`)"
    if step - clock.version - 1 >= clock.rules.stale_threshold:
        return f"the live weights, version {clock.version}, are too old for it: publish newer ones"
    if running:
        return f"{workers} workers are generating"
    if pending:
        return "no worker takes the pending groups" + ("" if workers else ", none is alive (`rollq work`)")
    return "nothing is scheduled: is a producer running (`rollq produce`), and does its prompt file hold prompts?"
