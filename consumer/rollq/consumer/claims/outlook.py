"""Why a batch does not fill, and whether it ever will. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.tasks import Clock, Control, Counts
from rollq.buffer.common.counting import count
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.rollouts import Status


class Outlook(StrEnum):
    """Whether a short batch can still fill."""

    WAIT = "wait"  # it may fill
    SYNC_FIRST = "sync first"  # the live weights are too old for it: newer weights were trained, but not published
    STALLED = "stalled"  # no group is pending or running, and a full server admits none
    STOPPED = "stopped"  # production was stopped, and no running group can fill it
    DONE = "done"  # a task's own hook ended its production, and no pending or running group can fill it


def outlook(shortfall: Shortfall, counts: Iterable[Counts], fullness: Fullness) -> Outlook:
    """Judge whether the batch can still fill.

    `counts` covers the batch's tasks; `fullness` is the buffer's.

    The weights are too old if none of the groups that they generate may be trained at the step: then no pending or
    running group can help. A trainer that has trained the previous step has newer weights, since a version is a trained
    step. A full server's memory stays full while its trainer waits.
    """
    short = [each for each in counts if each.task in shortfall.wanted]
    if any(_weights_too_old(shortfall.step, each) for each in short):
        return Outlook.SYNC_FIRST
    # a task with enough ready groups only waits for stragglers
    lacking = [each for each in short if shortfall.ready[each.task] < shortfall.wanted[each.task]]
    room = Fullness() if shortfall.unarchived else fullness  # archived groups make room
    outlooks = (_task_outlook(each, room) for each in lacking)
    return next((final for final in outlooks if final is not Outlook.WAIT), Outlook.WAIT)


def _weights_too_old(step: int, counts: Counts) -> bool:
    if counts.clock.rules.offline:
        return False  # weights do not make its groups
    return step - counts.clock.version - 1 >= counts.clock.rules.stale_threshold


def _task_outlook(counts: Counts, fullness: Fullness) -> Outlook:
    """The outlook of a task with too few ready groups."""
    control = counts.clock.control
    if counts.statuses.get(Status.RUNNING, 0):
        return Outlook.WAIT
    if control is Control.STOPPED:
        return Outlook.STOPPED
    if counts.statuses.get(Status.PENDING, 0):
        return Outlook.WAIT
    if control is Control.DONE:
        return Outlook.DONE
    return Outlook.STALLED if fullness.is_full else Outlook.WAIT


def explain_wait(
    shortfall: Shortfall, counts: Sequence[Counts], workers: Mapping[str, Mapping[str, Any]], fullness: Fullness
) -> str:
    """Explain what holds the batch back, with every task's counts by status.

    `workers` maps the names of live workers to their last reports; `fullness` is the buffer's.
    """
    if not shortfall.wanted:
        return f"no batch for step {shortfall.step}: rank 0 has not finished the release of the last one"
    lines = [_describe(shortfall, each, len(workers), fullness) for each in counts]
    lines += [f"  {name}: {why}" for name, report in workers.items() if (why := report.get("refused_weights"))]
    if fullness.is_full:
        lines.append(
            f"  {fullness}, and no new groups are admitted: raise {fullness.limit}, use smaller batches, checkpoint "
            "more often, or keep fewer failed and filtered groups (audit_groups)"
        )
    return f"no batch for step {shortfall.step}:\n" + "\n".join(lines)


def _describe(shortfall: Shortfall, counts: Counts, workers: int, fullness: Fullness) -> str:
    statuses = ", ".join(f"{status.value} {number}" for status, number in counts.statuses.items() if number)
    shown = f"  task {counts.task!r}: {statuses or 'nothing scheduled'}"
    if counts.task not in shortfall.wanted:
        return f"{shown}; it has enough"
    wanted, ready = shortfall.wanted[counts.task], shortfall.ready[counts.task]
    return f"{shown}; {ready} of {wanted} ready: {_reason(shortfall, counts, workers, fullness)}{_failures(counts)}"


def _failures(counts: Counts) -> str:
    """Which groups fail, and the task's last error, unless the reason for a stopped task already quotes it."""
    if counts.last_error is None or counts.clock.control is Control.STOPPED:
        return ""
    failed = counts.failed_in_a_row
    return (f"; the last {count(failed, 'group')} failed" if failed else "") + f"; the last error: {counts.last_error}"


def _why_not_produced(clock: Clock) -> str:
    """The order that holds production back: an operator's, a producer's, or the trainer's."""
    if clock.control is Control.PAUSE:
        return "production is set to pause: `rollq resume` continues it"
    remedy = "; fix the cause, then let production continue (`rollq resume`)"
    stopped = remedy if clock.control is Control.STOPPED else ""
    return f"production is set to {clock.control.value}: {clock.control_reason}{stopped}"


def _reason(shortfall: Shortfall, counts: Counts, workers: int, fullness: Fullness) -> str:
    clock = counts.clock
    pending, running = counts.statuses.get(Status.PENDING, 0), counts.statuses.get(Status.RUNNING, 0)
    unarchived = shortfall.unarchived.get(counts.task, 0)
    archive = (
        f"waits for the archive: {count(unarchived, 'group')}; start `rollq archive`, or raise max_uncheckpointed_steps"
    )
    if unarchived and shortfall.ready[counts.task] >= shortfall.wanted[counts.task]:
        return archive
    if clock.control is not Control.RUN:
        return _why_not_produced(clock)
    if _weights_too_old(shortfall.step, counts):
        return f"the live weights, version {clock.version}, are too old for it: publish newer ones"
    if unarchived:
        return archive
    if late := shortfall.stragglers.get(counts.task, 0):
        return f"waiting for {count(late, 'running group')} that would be too old at the next step"
    if clock.rules.offline:
        return f"only imports fill it: `rollq import {task_of(counts.task)} SAMPLES`"
    if running:
        return "1 worker is generating" if workers == 1 else f"{workers} workers are generating"
    if pending:
        return "no worker takes the pending groups" + ("" if workers else ", none is alive (`rollq work`)")
    if fullness.is_full:
        return "nothing is scheduled, because nothing new is admitted"
    return "nothing is scheduled: is a producer running (`rollq produce`), and does its prompt file contain prompts?"
