"""How a run is, in one sentence: whether it moves, and if not, who holds it back; and what to do. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rollq.buffer.values.memory_use import FULL, Fullness
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.imbalance import imbalance
from rollq.monitor.status.prompt_rows import PromptRows, reasons
from rollq.monitor.status.read import SILENT_PRODUCER_S, RunStatus, TaskStatus
from rollq.monitor.status.trainer_words import described, is_silent, shortened
from rollq.monitor.text.units import count, in_config, of_limit, seconds_in_words

LEAST_OUTCOMES = 4
"""Finished groups from which on none worth training is a failure, and not chance."""
LONG_WAIT_S = 5.0
MOST_UNREWARDED = 0.1
"""The share of judged samples without a reward from which on a run fails."""
_RESTING = ("paused", "draining")
"""States of workers that take no groups, by order of an operator."""


class State(StrEnum):
    """The state of a run. Each has another first word on the screen."""

    STARTING = "starting"  # no trainer has started
    TRAINING = "training"  # the trainer has what it needs
    STARVING = "starving"  # the trainer waits for groups
    PAUSED = "paused"  # on purpose
    FAILING = "failing"  # what is produced is of no use
    MEMORY_FULL = "memory full"  # nothing new is admitted
    TRAINER_GONE = "trainer gone"  # it is silent, or has failed
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
    def to_do(self) -> list[str]:
        """The lines below the first one: what to do, a step each; none without a remedy."""
        if len(self.remedies) < 2:
            return [f"to do: {remedy}" for remedy in self.remedies]
        return ["to do:", *(f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, start=1))]


def diagnose(run: RunStatus) -> Diagnosis:
    """Diagnose a run. The first state that applies counts, in an order in which each explains those after it."""
    trainer, tasks = run.trainer, [task for task in run.tasks if task.is_trained]
    sampled = [task for task in tasks if task.is_sampled]
    remedies = _Remedies()
    if trainer is None:
        remedies.add("start the trainer: `rollq train`")
        remedies.add_roles(run, sampled)
        facts = ["no trainer has started", *_unproduced(run), *_warnings(run, remedies)]
        return Diagnosis(State.STARTING, _join(facts), remedies.found)
    if trainer.phase is TrainerPhase.FINISHED:
        return Diagnosis(State.FINISHED, f"the trainer has ended after step {_last_step(run)}")
    if run.fullness.is_full:
        remedies.add(_more_room(run.fullness))
        remedies.add_restarts(run, sampled)
        if any(task.groups(Status.ARCHIVED) for task in tasks):
            remedies.add(
                "against a next time, save checkpoints more often, with a smaller `checkpoint_every`: trained groups "
                "stay in memory until the next one"
            )
        size = of_limit(run.fullness.used_bytes, run.fullness.limit_bytes)
        facts = [f"{run.fullness}{size}, and no new groups are admitted from {FULL:.0%} on"]
        return Diagnosis(State.MEMORY_FULL, _join([*facts, _consequence(trainer, "ProductionStalled")]), remedies.found)
    if failures := [text for task in tasks if (text := _failure(task))]:
        remedies.add("mend the cause")
        if run.alive_workers:
            remedies.add("restart every worker: until then it runs the old code and settings")
        if any(task.control == "stopped" for task in tasks):
            remedies.add("let production continue: `rollq resume`")
        remedies.add_restarts(run, sampled)
        return Diagnosis(State.FAILING, _join([*failures, _consequence(trainer, "ProductionStopped")]), remedies.found)
    if trainer.phase is TrainerPhase.FAILED:
        remedies.add("mend what the error names, or it comes again")
        remedies.add_restarts(run, sampled)
        return Diagnosis(State.TRAINER_GONE, _consequence(trainer), remedies.found)
    if is_silent(trainer):
        remedies.add_restarts(run, sampled)
        return Diagnosis(State.TRAINER_GONE, described(trainer), remedies.found)
    if trainer.phase is TrainerPhase.STOPPED:
        remedies.add_restarts(run, sampled)
        return Diagnosis(State.STOPPED, f"the trainer was stopped after step {_last_step(run)}", remedies.found)
    if paused := [task for task in tasks if task.control == "pause"]:
        names = f"task{'s' if len(paused) > 1 else ''} {', '.join(task.task for task in paused)}"
        why = next((f": {task.control_reason}" for task in paused if task.control_reason), "")
        remedies.add("if the pause is no longer wanted: `rollq resume`")
        remedies.add_roles(run, sampled)
        return Diagnosis(State.PAUSED, _join([f"{names} set to pause{why}", described(trainer)]), remedies.found)
    if unrewarded := _unrewarded(run, remedies):
        return Diagnosis(State.FAILING, _join([unrewarded, described(trainer)]), remedies.found)
    work, empty = [described(trainer)], [*_empty(trainer, tasks, remedies)]
    remedies.add_roles(run, sampled)
    causes = [*empty, *_unproduced(run), *_production(run, sampled, remedies)]
    warnings = [*_warnings(run, remedies)]
    if trainer.phase is not TrainerPhase.WAITING:
        return Diagnosis(State.TRAINING, _join([*work, *causes, *warnings]), remedies.found)
    is_resting = sampled and len(_resting(run)) == len(run.alive_workers) > 0
    facts = [*work, *causes] if trainer.unarchived else [*causes, *work]  # the cause comes first
    return Diagnosis(State.PAUSED if is_resting else State.STARVING, _join([*facts, *warnings]), remedies.found)


class _Remedies:
    """Collects what to do, in the order of the facts that ask for it."""

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()

    def add(self, remedy: str) -> None:
        self.found = (*self.found, remedy)

    def add_restarts(self, run: RunStatus, sampled: list[TaskStatus]) -> None:
        """Ask for a restart of a trainer that is there no more, and for other roles that are missing."""
        trainer = run.trainer
        if trainer and (trainer.has_ended or is_silent(trainer)):
            covered = max((task.checkpoint for task in run.tasks if task.is_trained), default=0)
            then = (
                f"continues from its checkpoint of step {covered}"
                if covered
                else "begins anew, as no checkpoint is known"
            )
            old = "; an old trainer that still runs can no longer write then" if is_silent(trainer) else ""
            self.add(f"start the trainer again: `rollq train` {then}{old}")
        self.add_roles(run, sampled)

    def add_roles(self, run: RunStatus, sampled: list[TaskStatus]) -> None:
        """Ask for a producer and a worker, where there is none."""
        if _unproduced(run):
            self.add("start the producer: `rollq produce`")
        if sampled and not run.alive_workers:
            self.add("start a worker: `rollq work`")


def _more_room(fullness: Fullness) -> str:
    """How a full buffer gets more room."""
    if fullness.limit != "maxmemory":
        return f"raise {fullness.limit} in the settings file, and restart the producer and the trainer"
    size = in_config(2 * fullness.limit_bytes) if fullness.limit_bytes else "BYTES"
    command = f"`redis-cli CONFIG SET maxmemory {size}`"
    return f"raise maxmemory, if the machine has more: {command}, and in its configuration file"


def _unrewarded(run: RunStatus, remedies: _Remedies) -> str:
    """That judges fail for too many samples, and how; empty if they do not."""
    shares = {name: report.get("unrewarded") or 0.0 for name, report in run.alive_workers.items()}
    share = sum(shares.values()) / len(shares) if shares else 0.0
    if share < MOST_UNREWARDED:
        return ""
    remedies.add(
        "mend the judge, or what it depends on, and restart every worker: samples that it fails for are left out, and "
        'the others of their groups trained alone; on_judge_error = "zero" counts them as wrong instead'
    )
    error = run.alive_workers[max(shares, key=shares.__getitem__)].get("judge_error") or ""
    return f"the judges failed for {share:.0%} of the samples of the last minute, the last one with {shortened(error)}"


def _consequence(trainer: TrainerState, error: str = "") -> str:
    """The work of the trainer, or how it failed; with `error` in its name, because of what the sentence said before."""
    if trainer.phase is not TrainerPhase.FAILED or not trainer.error:
        return described(trainer)
    if error and trainer.error.startswith(f"{error}:"):
        return f"because of that {described(trainer)}"
    return f"{described(trainer)} with {shortened(trainer.error)}"


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
    names = ", ".join(task.task for task in tasks if task.groups(Status.PENDING))
    waiting = (
        [f"{count(pending, 'group')} of task {names} {'is' if pending == 1 else 'are'} pending"] if pending else []
    )
    held = [task for task in tasks if is_held(task) and not task.groups(Status.PENDING)]
    for version in sorted({task.next_version for task in held}):
        of = (
            f" of task {', '.join(t.task for t in held if t.next_version == version)}" if len(held) < len(tasks) else ""
        )
        yield f"production{of} is held by the staleness bound until version {version} is published"
    for task in tasks:
        if task.control == "done":
            yield f"production of task {task.task} has ended: {task.control_reason}"
        elif not is_held(task) and not running and not pending and alive and _is_produced(task) and _has_waited(run):
            yield f"nothing of task {task.task} is scheduled"
            remedies.add(f"look at the producer's log: does it find prompts of task {task.task}?")
    for name, report in alive.items():
        if why := report.get("refused_weights"):
            yield f"worker {name} refuses the weights: {shortened(why)}"
        if place := report.get("blocked_by"):
            yield f"worker {name} is blocked by {place}"
            remedies.add("make that function a plain one, which runs in a thread, or let it await what it waits for")
        if hanging := report.get("hanging_calls"):
            yield f"{count(hanging, 'call')} of judges hang on worker {name}"
            remedies.add("set isolate_judge = true: then a call that takes too long is killed")
    if not alive:
        yield from ["no worker is alive", *waiting]
    elif len(resting) == len(alive):
        one = next(iter(resting))
        who = f"the only worker is {resting[one]}" if len(resting) == 1 else "all workers are paused or draining"
        yield from [who, *waiting]
        name = one if len(resting) == 1 else "NAME"
        remedies.add(f"if this is no longer wanted: `rollq resume --worker {name}`")
    elif running:
        yield f"{count(running, 'group')} in generation on {count(len(alive), 'worker')}"
        if uneven := imbalance(run):
            yield uneven
            remedies.add(
                "look at the log of an idle worker: are its weights, its tasks and its release those of the others?"
            )
    elif pending:
        yield f"no worker takes the {pending} pending groups: all workers are idle"
    else:
        yield "all workers are idle"


def _resting(run: RunStatus) -> dict[str, str]:
    """The workers that take no groups by order of an operator, with their states."""
    return {name: report["state"] for name, report in run.alive_workers.items() if report.get("state") in _RESTING}


def is_held(task: TaskStatus) -> bool:
    """Whether the staleness bound holds production back: all groups that it allows are trained or on their way."""
    return task.control == "run" and task.scheduled >= task.limit


def _unproduced(run: RunStatus) -> list[str]:
    """That nobody produces, where somebody should."""
    silent = [task for task in run.tasks if task.is_sampled and not _is_produced(task)]
    ages = [task.producer_silent_s for task in silent if task.producer_silent_s is not None]
    since = f" for {seconds_in_words(min(ages))}" if ages else ""
    if not silent:
        return []
    return [f"nobody produces{since}", *(_unusable(task) for task in run.tasks if task.unusable)]


def _unusable(task: TaskStatus) -> str:
    """That rows of a task's prompts are unusable: when too many are, its producer does not run."""
    rows = PromptRows.counted(task.progress)
    read = f" of {count(rows.read, 'row')} that {'was' if rows.read == 1 else 'were'} read" if rows else ""
    unusable = sum(found.rows for found in task.unusable.values())
    return f"{unusable}{read} of task {task.task} {'is' if unusable == 1 else 'are'} unusable: {reasons(task.unusable)}"


def _warnings(run: RunStatus, remedies: _Remedies) -> Iterator[str]:
    for found in ("silent", "dead"):
        if names := [name for name, report in run.workers.items() if report["condition"] == found]:
            yield f"{count(len(names), 'worker')} {'is' if len(names) == 1 else 'are'} {found}"
    if doubts := sorted({doubt for report in run.alive_workers.values() if (doubt := report.get("judge_doubt"))}):
        yield shortened("; ".join(doubts))
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


def _last_step(run: RunStatus) -> int:
    return max((task.step for task in run.tasks if task.is_trained), default=1) - 1


def _join(parts: list[str]) -> str:
    return "; ".join(parts)
