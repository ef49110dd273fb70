"""A run's state in one sentence: whether it makes progress and, if not, the obstacle and the remedy. Pure.

`RULES` are tried in order, since an earlier state explains later states.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollq.buffer.values.memory_use import FULL, Fullness
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.monitor.status.production_facts import (
    LONG_WAIT_S,
    empty_tasks,
    failures,
    production,
    remedies_of,
    resting,
    sampled,
    sentences,
    trained,
    trainer_of,
    unproduced,
    unrewarded,
    warnings,
)
from rollq.monitor.status.read import RunStatus, TaskStatus
from rollq.monitor.status.trainer_words import described, is_silent, last_step, shortened
from rollq.monitor.text.units import in_config, of_limit

FIRST_WAIT_S = 60.0
"""How long the first batch may take: workers load their model."""


class State(StrEnum):
    """The state of a run: the first word on the screen."""

    STARTING = "starting"  # no trainer has started
    TRAINING = "training"  # the trainer has its batch, or waits no longer than usual
    STARVING = "starving"  # the trainer waits for groups for too long
    PAUSED = "paused"  # on purpose
    FAILING = "failing"  # production yields no groups to train
    MEMORY_FULL = "memory full"  # nothing new is admitted
    TRAINER_GONE = "trainer gone"  # the trainer is silent or has failed
    STOPPED = "stopped"  # the trainer was asked to end
    FINISHED = "finished"  # the trainer has trained all its steps


class Level(StrEnum):
    """The colour of a diagnosis, the same in every view."""

    GOOD = "good"  # green
    ATTENTION = "attention"  # amber: the trainer waits, or there is something to do
    BAD = "bad"  # red: the run is stuck, or soon will be


_BAD = (State.FAILING, State.MEMORY_FULL, State.TRAINER_GONE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A run's state and the reason in one sentence. `remedies` lists the steps to take, in order; a healthy run has
    none."""

    state: State
    sentence: str
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The first line of the screen."""
        return f"{self.state}: {self.sentence}"

    @property
    def level(self) -> Level:
        """The severity."""
        if self.state in _BAD:
            return Level.BAD
        return Level.ATTENTION if self.remedies or self.state is State.STARVING else Level.GOOD

    @property
    def to_do(self) -> list[str]:
        """The lines below the first: a remedy per line, if any."""
        if len(self.remedies) < 2:
            return [f"to do: {remedy}" for remedy in self.remedies]
        return ["to do:", *(f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, start=1))]


@dataclass(frozen=True, slots=True)
class Rule:
    """A state, the condition under which it `applies` if no earlier rule does, and its `facts` and `remedies`."""

    state: State
    applies: Callable[[RunStatus], object]
    facts: Callable[[RunStatus], Iterable[str]]
    remedies: Callable[[RunStatus], Iterable[str]]


def diagnose(run: RunStatus) -> Diagnosis:
    """Diagnose a run by the first rule that applies."""
    rule = next(rule for rule in RULES if rule.applies(run))
    return Diagnosis(rule.state, "; ".join(rule.facts(run)), tuple(rule.remedies(run)))


# -- facts


def _starting(run: RunStatus) -> list[str]:
    return ["no trainer has started", *unproduced(run), *sentences(warnings(run))]


def _memory_full(run: RunStatus) -> list[str]:
    size = of_limit(run.fullness.used_bytes, run.fullness.limit_bytes)
    full = f"{run.fullness}{size}, and no new groups are admitted above {FULL:.0%}"
    return [full, _consequence(run, "ProductionStalled")]


def _paused(run: RunStatus) -> list[str]:
    paused = _paused_tasks(run)
    names = f"task{'s' if len(paused) > 1 else ''} {', '.join(task.task for task in paused)}"
    why = next((f": {task.control_reason}" for task in paused if task.control_reason), "")
    return [f"{names} set to pause{why}", described(trainer_of(run))]


def _training(run: RunStatus) -> list[str]:
    return [*_trainer(run), *_causes(run), *sentences(warnings(run))]


def _waiting(run: RunStatus) -> list[str]:
    """The cause comes first, unless the trainer reports it."""
    if trainer_of(run).unarchived:
        return _training(run)
    return [*_causes(run), *_trainer(run), *sentences(warnings(run))]


def _trainer(run: RunStatus) -> list[str]:
    trainer = trainer_of(run)
    return [described(trainer), *last_step(trainer)]


def _causes(run: RunStatus) -> list[str]:
    return [*sentences(empty_tasks(run)), *unproduced(run), *sentences(production(run))]


def _consequence(run: RunStatus, error: str = "") -> str:
    """The trainer's activity or failure. A failure whose name contains `error` follows from the sentence's earlier
    part."""
    trainer = trainer_of(run)
    if trainer.phase is not TrainerPhase.FAILED or not trainer.error:
        return described(trainer)
    if error and trainer.error.startswith(f"{error}:"):
        return f"because of that {described(trainer)}"
    return f"{described(trainer)} with {shortened(trainer.error)}"


# -- remedies


def _to_start(run: RunStatus) -> Iterator[str]:
    yield "start the trainer: `rollq train`"
    yield from _missing_roles(run)
    yield from remedies_of(warnings(run))


def _to_make_room(run: RunStatus) -> Iterator[str]:
    yield _more_room(run.fullness)
    yield from _restarts(run)
    if any(task.groups(Status.ARCHIVED) for task in trained(run)):
        yield (
            "to avoid this, save checkpoints more often, with a smaller `checkpoint_every`: trained groups stay in "
            "memory until the next checkpoint"
        )


def _to_mend(run: RunStatus) -> Iterator[str]:
    yield "fix the cause"
    if run.alive_workers:
        yield "restart every worker: a running worker keeps its old code and settings"
    if any(task.control == "stopped" for task in trained(run)):
        yield "let production continue: `rollq resume`"
    yield from _restarts(run)


def _after_an_error(run: RunStatus) -> list[str]:
    return ["fix the cause first, or it will fail again", *_restarts(run)]


def _to_resume(run: RunStatus) -> list[str]:
    return ["continue with `rollq resume`", *_missing_roles(run)]


def _to_speed_up(run: RunStatus) -> list[str]:
    facts = [*production(run), *warnings(run)]
    return [*remedies_of(empty_tasks(run)), *_missing_roles(run), *remedies_of(facts)]


def _restarts(run: RunStatus) -> Iterator[str]:
    """Restart a missing trainer and other missing roles."""
    trainer = trainer_of(run)
    if trainer.has_ended or is_silent(trainer):
        covered = max((task.checkpoint for task in trained(run)), default=0)
        then = (
            f"continues from its checkpoint of step {covered}" if covered else "starts over, as no checkpoint is known"
        )
        old = "; an old trainer that still runs can no longer write then" if is_silent(trainer) else ""
        yield f"start the trainer again: `rollq train` {then}{old}"
    yield from _missing_roles(run)


def _missing_roles(run: RunStatus) -> Iterator[str]:
    if unproduced(run):
        was_seen = any(task.producers for task in run.tasks)
        waits = "; if the last one still runs, its log says what it waits for" if was_seen else ""
        yield f"start the producer: `rollq produce`{waits}"
    if sampled(run) and not run.alive_workers:
        yield "start a worker: `rollq work`"


def _more_room(fullness: Fullness) -> str:
    """How to give a full buffer more room."""
    if fullness.limit != "maxmemory":
        return f"raise {fullness.limit} in the settings file, and restart the producer and the trainer"
    size = in_config(2 * fullness.limit_bytes) if fullness.limit_bytes else "BYTES"
    command = f"`redis-cli CONFIG SET maxmemory {size}`"
    return (
        f"raise maxmemory, if the machine has more memory: {command}, and the same in the server's configuration file"
    )


def _none(run: RunStatus) -> tuple[str, ...]:
    return ()


# -- rules


def _paused_tasks(run: RunStatus) -> list[TaskStatus]:
    return [task for task in trained(run) if task.control == "pause"]


def _is_resting(run: RunStatus) -> bool:
    """Whether an operator has ordered all workers to take no groups."""
    return bool(sampled(run)) and len(resting(run)) == len(run.alive_workers) > 0


def _waits_too_long(run: RunStatus) -> bool:
    """Whether the trainer waits for a missing role, or for more than twice its usual step.

    The usual step is the training time; in a synchronous run, the median wait is added. An asynchronous run should
    never wait, even if its waits are common.
    """
    trainer = trainer_of(run)
    if trainer.unarchived or [*empty_tasks(run), *_missing_roles(run)]:
        return True
    if any(task.control == "done" for task in sampled(run)) or any(map(_refuses, run.alive_workers.values())):
        return True
    if trainer.busy_s is None:
        return trainer.for_s > FIRST_WAIT_S
    return trainer.for_s > max(LONG_WAIT_S, 2 * (trainer.busy_s + _due_wait_s(run)))


def _due_wait_s(run: RunStatus) -> float:
    """The wait in each step of a synchronous run."""
    is_synchronous = all(task.stale_threshold <= 1 for task in sampled(run))
    return (trainer_of(run).usual_wait_s or 0.0) if is_synchronous else 0.0


def _evaluates_alone(run: RunStatus) -> bool:
    """Whether the trainer waits for an evaluation that lacks a producer or a worker."""
    return trainer_of(run).phase is TrainerPhase.EVALUATING and any(_missing_roles(run))


def _refuses(report: Mapping[str, Any]) -> bool:
    return bool(report.get("refused_weights") or report.get("blocked_by"))


def _last_step(run: RunStatus) -> int:
    return max((task.step for task in trained(run)), default=1) - 1


RULES = (
    Rule(State.STARTING, lambda run: run.trainer is None, _starting, _to_start),
    Rule(
        State.FINISHED,
        lambda run: trainer_of(run).phase is TrainerPhase.FINISHED,
        lambda run: [f"the trainer has ended after step {_last_step(run)}"],
        _none,
    ),
    Rule(State.MEMORY_FULL, lambda run: run.fullness.is_full, _memory_full, _to_make_room),
    Rule(State.FAILING, failures, lambda run: [*failures(run), _consequence(run, "ProductionStopped")], _to_mend),
    Rule(
        State.TRAINER_GONE,
        lambda run: trainer_of(run).phase is TrainerPhase.FAILED,
        lambda run: [_consequence(run)],
        _after_an_error,
    ),
    Rule(
        State.TRAINER_GONE, lambda run: is_silent(trainer_of(run)), lambda run: [described(trainer_of(run))], _restarts
    ),
    Rule(
        State.STOPPED,
        lambda run: trainer_of(run).phase is TrainerPhase.STOPPED,
        lambda run: [f"the trainer was stopped after step {_last_step(run)}"],
        _restarts,
    ),
    Rule(State.PAUSED, _paused_tasks, _paused, _to_resume),
    Rule(
        State.FAILING,
        unrewarded,
        lambda run: [*sentences(unrewarded(run)), described(trainer_of(run))],
        lambda run: remedies_of(unrewarded(run)),
    ),
    Rule(State.STARVING, _evaluates_alone, _waiting, _to_speed_up),
    Rule(State.TRAINING, lambda run: trainer_of(run).phase is not TrainerPhase.WAITING, _training, _to_speed_up),
    Rule(State.PAUSED, _is_resting, _waiting, _to_speed_up),
    Rule(State.STARVING, _waits_too_long, _waiting, _to_speed_up),
    Rule(State.TRAINING, lambda run: True, _training, _to_speed_up),
)
"""The first rule that applies counts."""
