"""How a run is, in one sentence: whether it moves, and if not, who holds it back; and what to do. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rollq.buffer.fullness import FULL
from rollq.buffer.rollouts import Status
from rollq.buffer.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status import SILENT_PRODUCER_S, SILENT_TRAINER_S, RunStatus, TaskStatus
from rollq.monitor.units import count, seconds_in_words

LEAST_OUTCOMES = 4
"""Finished groups from which on none worth training is a failure, and not chance."""
LONG_WAIT_S = 5.0
RESTART = "start the trainer again: `rollq train` continues from its last checkpoint"
_RESTING = ("paused", "draining")
"""States of workers that take no groups, by order of an operator."""
MOST_ERROR = 400
"""Characters of an error that are shown."""


class State(StrEnum):
    """The state of a run. Each has another first word on the screen."""

    STARTING = "starting"  # no trainer has started
    TRAINING = "training"  # the trainer has what it needs
    STARVING = "starving"  # the trainer waits for groups
    PAUSED = "paused"  # on purpose
    FAILING = "failing"  # what is produced is of no use
    MEMORY_FULL = "memory full"  # nothing new is admitted
    TRAINER_GONE = "trainer gone"  # it is silent, or has ended with an error
    STOPPED = "stopped"  # the trainer was asked to end
    FINISHED = "finished"  # the trainer has trained all its steps


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of a run, and why in one sentence. `remedies`: what to do, in this order; none where all is well."""

    state: State
    sentence: str
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The first line of the screen."""
        return f"{self.state}: {self.sentence}"

    @property
    def to_do(self) -> str:
        """The second line of the screen; empty without a remedy."""
        steps = [f"{number}. {remedy}" for number, remedy in enumerate(self.remedies, start=1)]
        return "to do: " + "; ".join(steps if len(steps) > 1 else self.remedies) if steps else ""


def diagnose(run: RunStatus) -> Diagnosis:
    """Diagnose a run. The first state that applies counts, in an order in which each explains those after it."""
    trainer, tasks = run.trainer, [task for task in run.tasks if task.is_trained]
    remedies = _Remedies()
    if trainer is None:
        remedies.add("start the trainer: `rollq train`")
        facts = ["no trainer has started", *_warnings(run, remedies)]
        return Diagnosis(State.STARTING, _join(facts), remedies.found)
    if trainer.phase is TrainerPhase.FINISHED:
        return Diagnosis(State.FINISHED, f"the trainer has ended after step {_last_step(run)}")
    if run.fullness.is_full:
        remedies.add(f"raise {run.fullness.limit}, or save checkpoints more often: what is trained stays until then")
        remedies.add_restart(trainer)
        facts = [f"{run.fullness}, and no new groups are admitted from {FULL:.0%} on", _describe(trainer)]
        return Diagnosis(State.MEMORY_FULL, _join(facts), remedies.found)
    if failures := [text for task in tasks if (text := _failure(task))]:
        remedies.add("mend the cause; workers load their code when they start")
        if any(task.control == "stopped" for task in tasks):
            remedies.add("let production continue: `rollq resume`")
        remedies.add_restart(trainer)
        return Diagnosis(State.FAILING, _join([*failures, _describe(trainer)]), remedies.found)
    if trainer.phase is TrainerPhase.FAILED:
        remedies.add("mend what the error names, or it comes again")
        remedies.add_restart(trainer)
        why = f" with {shortened(trainer.error)}" if trainer.error else ""
        return Diagnosis(State.TRAINER_GONE, f"{_work(trainer)}{why}", remedies.found)
    if _is_silent(trainer):
        remedies.add(f"{RESTART}; should the old one still run, it is shut out")
        return Diagnosis(State.TRAINER_GONE, _describe(trainer), remedies.found)
    if trainer.phase is TrainerPhase.STOPPED:
        remedies.add_restart(trainer)
        return Diagnosis(State.STOPPED, f"the trainer was stopped after step {_last_step(run)}", remedies.found)
    if paused := [task for task in tasks if task.control == "pause"]:
        names = f"task{'s' if len(paused) > 1 else ''} {', '.join(task.task for task in paused)}"
        why = next((f": {task.control_reason}" for task in paused if task.control_reason), "")
        remedies.add("let production continue: `rollq resume`")
        return Diagnosis(State.PAUSED, _join([f"{names} set to pause{why}", _describe(trainer)]), remedies.found)
    trainer = _up_to_date(trainer, tasks)
    state = State.STARVING if trainer.phase is TrainerPhase.WAITING else State.TRAINING
    sampled = [task for task in tasks if task.is_sampled]
    if state is State.STARVING and sampled and len(_resting(run)) == len(run.alive_workers) > 0:
        state = State.PAUSED
    facts = [_describe(trainer), *_empty(trainer, tasks, remedies), *_production(run, sampled, remedies)]
    facts += _warnings(run, remedies)
    return Diagnosis(state, _join(facts), remedies.found)


class _Remedies:
    """Collects what to do, in the order of the facts that ask for it."""

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()

    def add(self, remedy: str) -> None:
        self.found = (*self.found, remedy)

    def add_restart(self, trainer: TrainerState) -> None:
        """Ask for a restart of a trainer that has ended."""
        if trainer.has_ended:
            self.add(RESTART)


def _up_to_date(trainer: TrainerState, tasks: list[TaskStatus]) -> TrainerState:
    """The state of a trainer that waits, when what it lacked a second ago may be there, or may be trained."""
    if trainer.phase is not TrainerPhase.WAITING:
        return trainer
    if any(task.step > trainer.step for task in tasks):
        return replace(trainer, phase=TrainerPhase.COMMITTED, step=max(task.step for task in tasks) - 1)
    ready = {task.task: task.ready for task in tasks}
    lacking = {task: wanted for task, wanted in trainer.wanted.items() if ready.get(task, 0) < wanted}
    if trainer.wanted and not lacking and not trainer.stragglers and not trainer.unarchived:
        return replace(trainer, phase=TrainerPhase.TRAINING, for_s=0.0)
    return replace(trainer, ready=ready, wanted=lacking)


def _describe(trainer: TrainerState) -> str:
    """The trainer's work, its last words, or its silence."""
    if trainer.has_ended or not _is_silent(trainer):
        return _work(trainer)
    last = f"; its last word was {trainer.phase}, step {trainer.step}" if trainer.phase else ""
    left_s = trainer.lease_left_s
    held = f"; its lease holds for {seconds_in_words(left_s)}" if left_s else "; its lease is over"
    return f"nothing has been heard of the trainer for {seconds_in_words(trainer.silent_s)}{last}{held}"


def _work(trainer: TrainerState) -> str:
    step, lasting = trainer.step, seconds_in_words(trainer.for_s)
    match trainer.phase:
        case None | TrainerPhase.STARTING:
            return "the trainer is starting"
        case TrainerPhase.WAITING:
            lacks = [f"task {task} has {trainer.ready[task]} of {n}" for task, n in trainer.wanted.items()]
            if unarchived := sum(trainer.unarchived.values()):
                lacks = [f"{count(unarchived, 'group')} must be in the archive before"]
            return f"the trainer has waited {lasting} for step {step}" + (f": {', '.join(lacks)}" if lacks else "")
        case TrainerPhase.TRAINING:
            return f"the trainer has been training step {step} for {lasting}"
        case TrainerPhase.COMMITTED:
            return f"the trainer has trained step {step}"
        case TrainerPhase.PUBLISHING:
            return f"the trainer has been publishing weights for {lasting}"
        case TrainerPhase.SAVING:
            return f"the trainer has been saving a checkpoint for {lasting}"
        case TrainerPhase.EVALUATING:
            return f"the trainer has been evaluating for {lasting}"
        case _:
            return f"the trainer has ended at step {step}"


def _failure(task: TaskStatus) -> str:
    """How production of a task fails; empty if it does not."""
    if task.control == "stopped":
        return f"production of task {task.task} has stopped: {shortened(task.control_reason)}"
    if task.outcomes < LEAST_OUTCOMES or task.kept or task.control == "pause":
        return ""
    failed, filtered = (int(task.progress.get(name, 0)) for name in ("failed", "filtered"))
    facts = f"none of the last {task.outcomes} groups of task {task.task} is worth training"
    counts = f"{failed} have failed and {filtered} were filtered out so far"
    last = f", the last one with {shortened(task.last_error.text)}" if task.last_error else ""
    return f"{facts}: {counts}{last}"


def _empty(trainer: TrainerState, tasks: list[TaskStatus], remedies: _Remedies) -> Iterator[str]:
    """Tasks without workers that a trainer waits for."""
    for task in tasks:
        if task.offline and trainer.phase is TrainerPhase.WAITING and task.ready < task.batch_groups:
            yield f"task {task.task} is filled by imports alone"
            remedies.add(
                f"import more into task {task.task}: `rollq import`; or take it out of this batch: `rollq retire "
                f"{task.task} --from-step {trainer.step}`"
            )


def _production(run: RunStatus, tasks: list[TaskStatus], remedies: _Remedies) -> Iterator[str]:
    """Who makes groups of these tasks, and what holds production back."""
    if not tasks:
        return
    running = sum(task.groups(Status.RUNNING) for task in tasks)
    pending = sum(task.groups(Status.PENDING) for task in tasks)
    alive, resting = run.alive_workers, _resting(run)
    if not alive:
        waiting = f", and {count(pending, 'group')} {'is' if pending == 1 else 'are'} pending" if pending else ""
        yield f"no worker is alive{waiting}"
        remedies.add("start a worker: `rollq work`")
    elif len(resting) == len(alive):
        waiting = f", and {count(pending, 'group')} {'is' if pending == 1 else 'are'} pending" if pending else ""
        one = next(iter(resting))
        who = f"the only worker is {resting[one]}" if len(resting) == 1 else "all workers are paused or draining"
        yield who + waiting
        remedies.add(f"let it work: `rollq resume --worker {one if len(resting) == 1 else 'NAME'}`")
    elif running:
        yield f"{count(running, 'group')} in generation on {count(len(alive), 'worker')}"
        if run.trainer and (late := sum(run.trainer.stragglers.values())):
            yield f"it also waits for {late} of them, which would be too old at the next step"
    elif pending:
        yield f"no worker takes the {pending} pending groups: all workers are idle"
    else:
        yield "all workers are idle"
    for name, report in alive.items():
        if why := report.get("refused_weights"):
            yield f"worker {name} refuses the weights: {shortened(why)}"
    held = [task for task in tasks if is_held(task) and not task.groups(Status.PENDING)]
    for version in sorted({task.next_version for task in held}):
        names = ", ".join(task.task for task in held if task.next_version == version)
        of = f" of task {names}" if len(held) < len(tasks) else ""
        yield f"production{of} is held by the staleness bound until version {version} is published"
    for task in tasks:
        if task.control == "done":
            yield f"production of task {task.task} has ended: {task.control_reason}"
        elif not is_held(task) and not running and not pending and alive and _is_produced(task) and _has_waited(run):
            yield f"nothing of task {task.task} is scheduled"
            remedies.add(f"look at the producer's log: does it find prompts of task {task.task}?")


def _resting(run: RunStatus) -> dict[str, str]:
    """The workers that take no groups by order of an operator, with their states."""
    return {name: report["state"] for name, report in run.alive_workers.items() if report.get("state") in _RESTING}


def is_held(task: TaskStatus) -> bool:
    """Whether the staleness bound holds production back: all groups that it allows are trained or on their way."""
    return task.control == "run" and task.scheduled >= task.limit


def _warnings(run: RunStatus, remedies: _Remedies) -> Iterator[str]:
    silent = [task for task in run.tasks if task.is_sampled and not _is_produced(task)]
    if silent:
        ages = [task.producer_silent_s for task in silent if task.producer_silent_s is not None]
        since = f" for {seconds_in_words(min(ages))}" if ages else ""
        yield f"nobody produces{since}"
        remedies.add("start the producer: `rollq produce`")
    for found in ("silent", "dead"):
        if names := [name for name, report in run.workers.items() if report["condition"] == found]:
            yield f"{count(len(names), 'worker')} {'is' if len(names) == 1 else 'are'} {found}"
    if troubles := sorted({task.archive_trouble for task in run.tasks if task.archive_trouble}):
        yield f"the archiver waits: {shortened('; '.join(troubles))}"
    waiting = [task.groups(Status.LEAVING) for task in run.tasks]
    is_said = run.trainer is not None and bool(run.trainer.unarchived)
    is_late = any(groups > 2 * task.batch_groups for groups, task in zip(waiting, run.tasks, strict=True))
    if is_late and not is_said:
        yield f"{count(sum(waiting), 'group')} wait for the archive"
    if (is_late or is_said) and not troubles and not any(task.archives for task in run.tasks):
        remedies.add("start the archiver: `rollq archive`")
    for task in run.tasks:
        if task.last_error and task.rates and task.rates.failed:
            yield f"groups of task {task.task} fail, the last one with {shortened(task.last_error.text)}"


def _is_produced(task: TaskStatus) -> bool:
    return task.producer_silent_s is not None and task.producer_silent_s <= SILENT_PRODUCER_S


def _has_waited(run: RunStatus) -> bool:
    """Whether the trainer waits for groups, and for longer than production needs to notice."""
    trainer = run.trainer
    if trainer is None or trainer.unarchived:  # then production may wait for the archive, too
        return False
    return trainer.phase is TrainerPhase.WAITING and trainer.for_s > LONG_WAIT_S


def _is_silent(trainer: TrainerState) -> bool:
    return not trainer.has_ended and (trainer.silent_s > SILENT_TRAINER_S or not trainer.lease_left_s)


def _last_step(run: RunStatus) -> int:
    return max((task.step for task in run.tasks if task.is_trained), default=1) - 1


def shortened(text: str) -> str:
    """A text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR else line[: MOST_ERROR - 3] + "..."


def _join(parts: list[str]) -> str:
    return "; ".join(parts)
