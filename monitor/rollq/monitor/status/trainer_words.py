"""Describes a trainer's current or last activity. Pure."""

from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.read import SILENT_TRAINER_S
from rollq.monitor.text.units import count, seconds_in_words

MOST_ERROR = 400
"""The most characters of an error."""
_BETWEEN_STEPS = {
    TrainerPhase.PUBLISHING: "publishing weights",
    TrainerPhase.SAVING: "saving a checkpoint",
    TrainerPhase.EVALUATING: "evaluating",
}


def is_silent(trainer: TrainerState) -> bool:
    """Whether a trainer that has not ended no longer reports."""
    return not trainer.has_ended and (trainer.silent_s > SILENT_TRAINER_S or not trainer.lease_left_s)


def described(trainer: TrainerState) -> str:
    """The trainer's activity, its end, or its silence."""
    if not is_silent(trainer):
        return _work(trainer)
    last = f"; it was then {last_work(trainer)}" if trainer.phase else ""
    left_s = trainer.lease_left_s
    held = f"; its lease holds for {seconds_in_words(left_s)}" if left_s else "; its lease is over"
    where = f" on {trainer.place}," if trainer.place else ""
    return f"nothing has been heard of the trainer{where} for {seconds_in_words(trainer.silent_s)}{last}{held}"


def last_step(trainer: TrainerState) -> list[str]:
    """How long ago the trainer trained its last step, if it still runs and has trained a step."""
    if trainer.last_step_s is None or trainer.phase is TrainerPhase.COMMITTED or is_silent(trainer):
        return []
    return [f"last step {seconds_in_words(trainer.last_step_s)} ago"]


def last_work(trainer: TrainerState) -> str:
    """The last reported activity of a silent trainer."""
    match trainer.phase:
        case TrainerPhase.WAITING:
            return f"waiting for step {trainer.step}"
        case TrainerPhase.TRAINING:
            return f"training step {trainer.step}"
        case TrainerPhase.COMMITTED:
            return f"done with step {trainer.step}"
        case phase if phase in _BETWEEN_STEPS:
            return f"{_BETWEEN_STEPS[phase]}, step {trainer.step}"
        case _:
            return "starting"


def shortened(text: str) -> str:
    """A text on one line, shortened if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR else line[: MOST_ERROR - 3] + "..."


def _work(trainer: TrainerState) -> str:
    step, lasting = trainer.step, seconds_in_words(trainer.for_s)
    match trainer.phase:
        case None | TrainerPhase.STARTING:
            return "the trainer is starting"
        case TrainerPhase.WAITING:
            waits = f"the trainer has waited {lasting} for step {step}"
            return ": ".join(filter(None, (waits, ", ".join(_lacks(trainer)))))
        case TrainerPhase.TRAINING:
            return f"the trainer has been training step {step} for {lasting}"
        case TrainerPhase.COMMITTED:
            return f"the trainer has trained step {step}"
        case phase if phase in _BETWEEN_STEPS:
            return f"the trainer has been {_BETWEEN_STEPS[phase]} for {lasting}"
        case TrainerPhase.FAILED:
            return f"the trainer failed at step {step}"
        case _:
            return f"the trainer has ended at step {step}"


def _lacks(trainer: TrainerState) -> list[str]:
    """The groups that a waiting trainer lacks."""
    if unarchived := sum(trainer.unarchived.values()):
        return [f"{count(unarchived, 'group')} must be in the archive before"]
    lacks = [f"task {task} has {trainer.ready[task]} of {count(n, 'group')}" for task, n in trainer.wanted.items()]
    if late := sum(trainer.stragglers.values()):
        lacks.append(f"{count(late, 'running group')} would be too old at the next step")
    return lacks
