"""Facts about a run's production, each with a remedy. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.imbalance import imbalance
from rollq.monitor.status.lost_workers import lost_workers
from rollq.monitor.status.prompt_rows import PromptRows, reasons
from rollq.monitor.status.read import SILENT_PRODUCER_S, RunStatus, TaskStatus, groups_in
from rollq.monitor.status.trainer_words import shortened
from rollq.monitor.text.units import count, seconds_in_words

LEAST_OUTCOMES = 4
"""If this many finished groups include none worth training, the cause is a failure and not chance."""
LONG_WAIT_S = 5.0
MOST_UNREWARDED = 0.1
"""The share of judged samples without a reward at which a run fails."""
_RESTING = ("paused", "draining")
"""States of workers that take no groups on an operator's order."""


class Fact(NamedTuple):
    """A part of the sentence with its remedy. A fact without words has only a remedy."""

    sentence: str
    remedy: str = ""


def sentences(facts: Iterable[Fact]) -> list[str]:
    """The words of facts."""
    return [fact.sentence for fact in facts if fact.sentence]


def remedies_of(facts: Iterable[Fact]) -> list[str]:
    """The remedies of facts, in their order."""
    return [fact.remedy for fact in facts if fact.remedy]


def trainer_of(run: RunStatus) -> TrainerState:
    """The trainer of a run that must have one."""
    assert run.trainer is not None
    return run.trainer


def trained(run: RunStatus) -> list[TaskStatus]:
    """The tasks that are trained."""
    return [task for task in run.tasks if task.is_trained]


def sampled(run: RunStatus) -> list[TaskStatus]:
    """The trained tasks whose groups workers make."""
    return [task for task in trained(run) if task.is_sampled]


def workers_of(run: RunStatus) -> str:
    """The live workers, out of all if others are silent or dead: `1 of 2 workers`."""
    alive, known = len(run.alive_workers), len(run.workers)
    return f"{alive:,} of {count(known, 'worker')}" if 0 < alive < known else count(alive, "worker")


def unrewarded(run: RunStatus) -> list[Fact]:
    """How judges fail for too many samples; empty if judges do not."""
    shares = {name: report.get("unrewarded") or 0.0 for name, report in run.alive_workers.items()}
    share = sum(shares.values()) / len(shares) if shares else 0.0
    if share < MOST_UNREWARDED:
        return []
    error = run.alive_workers[max(shares, key=shares.__getitem__)].get("judge_error") or ""
    return [
        Fact(
            f"the judges failed for {share:.0%} of the samples of the last minute, the last one with "
            f"{shortened(error)}",
            "fix the judge, or what it depends on, and restart every worker: samples for which it fails are left "
            'out, and the rest of their groups is trained; judging.on_judge_error = "zero" counts them as wrong '
            "instead",
        )
    ]


def failures(run: RunStatus) -> list[str]:
    """How production of trained tasks fails."""
    return [failure for task in trained(run) if (failure := _failure(task))]


def _failure(task: TaskStatus) -> str:
    """How a task's production fails; empty if it does not."""
    if task.control == "stopped":
        return f"production of task {task.task} has stopped: {shortened(task.control_reason)}"
    if task.outcomes < LEAST_OUTCOMES or task.kept or task.control == "pause":
        return ""
    failed, filtered = (int(task.progress.get(name, 0)) for name in ("failed", "filtered"))
    facts = f"none of the last {task.outcomes} groups of task {task.task} is worth training"
    counts = f"{failed} have failed and {filtered} were filtered out so far"
    last = f", the last one with {shortened(task.last_error.text)}" if task.last_error else ""
    return f"{facts}: {counts}{last}"


def empty_tasks(run: RunStatus) -> Iterator[Fact]:
    """Offline tasks that the trainer waits for."""
    trainer = trainer_of(run)
    for task in trained(run):
        if task.offline and trainer.phase is TrainerPhase.WAITING and task.ready < task.batch_groups:
            yield Fact(
                f"only imports fill task {task.task}",
                f"import more into task {task.task}: `rollq import`; or take it out of this batch: `rollq set "
                f"{task.task} batch_groups=0 --from-step {trainer.step}`",
            )


def production(run: RunStatus) -> Iterator[Fact]:
    """Which roles make sampled tasks' groups, and the limits on production."""
    if tasks := sampled(run):
        yield from map(Fact, _held(tasks))
        for task in tasks:
            yield from _schedule(run, task, tasks)
        for name in run.alive_workers:
            yield from _faults(run, name)
        yield from _capacity(run, tasks)


def _held(tasks: Sequence[TaskStatus]) -> Iterator[str]:
    held = [task for task in tasks if is_held(task) and not task.groups(Status.PENDING)]
    next_version = attrgetter("next_version")
    for version, of_version in groupby(sorted(held, key=next_version), next_version):
        names = ", ".join(task.task for task in of_version)
        of = f" of task {names}" if len(held) < len(tasks) else ""
        yield f"production{of} is held by the staleness bound until version {version} is published"


def _schedule(run: RunStatus, task: TaskStatus, tasks: Sequence[TaskStatus]) -> Iterator[Fact]:
    """The fact that a task's production has ended, or schedules nothing although the trainer waits."""
    if task.control == "done":
        yield Fact(f"production of task {task.task} has ended: {task.control_reason}")
        return
    is_idle = not groups_in(tasks, Status.RUNNING, Status.PENDING)
    should_produce = run.alive_workers and _is_produced(task) and not is_held(task)
    if is_idle and should_produce and _has_waited(run):
        yield Fact(
            f"nothing of task {task.task} is scheduled",
            f"look at the producer's log: does it find prompts of task {task.task}?",
        )


def _faults(run: RunStatus, name: str) -> Iterator[Fact]:
    """Faults that a worker reports."""
    report = run.alive_workers[name]
    if why := report.get("refused_weights"):
        yield Fact(f"worker {name} refuses the weights: {shortened(why)}")
    if place := report.get("blocked_by"):
        yield Fact(
            f"worker {name} is blocked by {place}",
            "make it a plain function, which runs in a thread, or let it await instead of blocking",
        )
    if hanging := report.get("hanging_calls"):
        yield Fact(
            f"{count(hanging, 'call')} of judges hang on worker {name}",
            "set judging.isolate_judge = true: then a call that takes too long is killed",
        )


def _capacity(run: RunStatus, tasks: Sequence[TaskStatus]) -> Iterator[Fact]:
    """Whether workers make groups and, if not, why."""
    running, pending = groups_in(tasks, Status.RUNNING), groups_in(tasks, Status.PENDING)
    if not run.alive_workers:
        yield from map(Fact, ["no worker is alive", *_pending(tasks)])
    elif len(resting(run)) == len(run.alive_workers):
        yield from _all_resting(run, tasks)
    elif running:
        yield Fact(f"{count(running, 'group')} running on {workers_of(run)}")
        if uneven := imbalance(run):
            yield Fact(
                uneven,
                "look at the log of an idle worker: does it have the same weights, tasks and release as the others?",
            )
    elif pending:
        yield Fact(f"no worker takes the {pending} pending groups: all workers are idle")
    else:
        yield Fact("all workers are idle")


def _all_resting(run: RunStatus, tasks: Sequence[TaskStatus]) -> Iterator[Fact]:
    states = resting(run)
    first = next(iter(states))
    who = f"the only worker is {states[first]}" if len(states) == 1 else "all workers are paused or draining"
    name = first if len(states) == 1 else "NAME"
    yield Fact(who, f"continue with `rollq resume --worker {name}`")
    yield from map(Fact, _pending(tasks))


def _pending(tasks: Sequence[TaskStatus]) -> list[str]:
    pending = groups_in(tasks, Status.PENDING)
    names = ", ".join(task.task for task in tasks if task.groups(Status.PENDING))
    return [f"{count(pending, 'group')} of task {names} {'is' if pending == 1 else 'are'} pending"] if pending else []


def resting(run: RunStatus) -> dict[str, str]:
    """The workers that take no groups on an operator's order, with their states."""
    return {name: report["state"] for name, report in run.alive_workers.items() if report.get("state") in _RESTING}


def is_held(task: TaskStatus) -> bool:
    """Whether the staleness bound holds production back, with all allowed groups trained or on their way."""
    return task.control == "run" and task.scheduled >= task.limit


def unproduced(run: RunStatus) -> list[str]:
    """A missing producer, if one is needed."""
    silent = [task for task in run.tasks if task.is_sampled and not _is_produced(task)]
    if not silent:
        return []
    return [f"nobody produces{_last_seen(silent)}", *(_unusable(task) for task in run.tasks if task.unusable)]


def _last_seen(tasks: Sequence[TaskStatus]) -> str:
    """How long the tasks' producers have been silent, and the last producer's place."""
    ages = [task.producer_silent_s for task in tasks if task.producer_silent_s is not None]
    since = f" for {seconds_in_words(min(ages))}" if ages else ""
    last = min((seen for task in tasks for seen in task.producers), key=lambda seen: seen.silent_s, default=None)
    return f"{since}, the last one on {last.place}" if last else since


def _unusable(task: TaskStatus) -> str:
    """The fact that rows of a task's prompts are unusable. If too many are, its producer does not run."""
    rows = PromptRows.counted(task.progress)
    read = f" of {count(rows.read, 'row')} that {'was' if rows.read == 1 else 'were'} read" if rows else ""
    unusable = sum(kind.rows for kind in task.unusable.values())
    return f"{unusable}{read} of task {task.task} {'is' if unusable == 1 else 'are'} unusable: {reasons(task.unusable)}"


def warnings(run: RunStatus) -> list[Fact]:
    """Faults that do not block the run, or not yet."""
    lost = [Fact(*lost) for lost in lost_workers(run)]
    return [*lost, *map(Fact, _doubts(run)), *_archive(run), *map(Fact, _failing_groups(run))]


def _doubts(run: RunStatus) -> Iterator[str]:
    if doubts := sorted({doubt for report in run.alive_workers.values() if (doubt := report.get("judge_doubt"))}):
        yield shortened("; ".join(doubts))


def _archive(run: RunStatus) -> Iterator[Fact]:
    if troubles := sorted({task.archive_trouble for task in run.tasks if task.archive_trouble}):
        yield Fact(f"the archiver waits: {shortened('; '.join(troubles))}")
    yield from _unarchived(run)


def _unarchived(run: RunStatus) -> Iterator[Fact]:
    is_said = run.trainer is not None and bool(run.trainer.unarchived)
    if late := [] if is_said else _late_groups(run):
        yield Fact(f"{count(sum(late), 'group')} wait for the archive")
    if (is_said or late) and not _has_archiver(run):
        yield Fact("", "start the archiver: `rollq archive`")


def _late_groups(run: RunStatus) -> list[int]:
    """The number of each task's groups that wait for the archive, if a task has more than two batches of such
    groups."""
    leaving = [(task.groups(Status.LEAVING), task.batch_groups) for task in run.tasks]
    return [groups for groups, _ in leaving] if any(groups > 2 * batch for groups, batch in leaving) else []


def _has_archiver(run: RunStatus) -> bool:
    return any(task.archives or task.archive_trouble for task in run.tasks)


def _failing_groups(run: RunStatus) -> Iterator[str]:
    for task in run.tasks:
        if task.last_error and task.rates and task.rates.failed:
            yield f"groups of task {task.task} fail, the last one with {shortened(task.last_error.text)}"


def _is_produced(task: TaskStatus) -> bool:
    return task.producer_silent_s is not None and task.producer_silent_s <= SILENT_PRODUCER_S


def _has_waited(run: RunStatus) -> bool:
    """Whether the trainer waits for groups, and for longer than production needs to notice."""
    trainer = run.trainer
    if trainer is None or trainer.unarchived:  # then production may also wait for the archive
        return False
    return trainer.phase is TrainerPhase.WAITING and trainer.for_s > LONG_WAIT_S
