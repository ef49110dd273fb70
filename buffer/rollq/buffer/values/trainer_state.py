"""A trainer's state: its reported phase, and its hold on the run. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from rollq.buffer.values.places import Place


class TrainerPhase(StrEnum):
    """A trainer's present work, or how it ended."""

    STARTING = "starting"  # it has the run, and has not asked for a batch yet
    WAITING = "waiting"  # for the batch of its step
    TRAINING = "training"  # it has the batch of its step
    PUBLISHING = "publishing"  # weights
    COMMITTED = "committed"  # it has trained its step, and has not asked for the next batch yet
    EVALUATING = "evaluating"
    SAVING = "saving"  # a checkpoint
    FINISHED = "finished"  # it ended without an error
    STOPPED = "stopped"  # it was asked to end
    FAILED = "failed"  # it ended with `error`


ENDED = (TrainerPhase.FINISHED, TrainerPhase.STOPPED, TrainerPhase.FAILED)
"""Phases after which a trainer makes no further report."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The trainer that took the run last.

    It last reported `silent_s` seconds ago, and keeps other trainers out for another `lease_left_s` seconds, 0 after
    its lease has run out. It has been in its `phase` for `for_s` seconds. While it waits, four fields map the tasks
    that lack groups to group counts: `wanted`, `ready`, `stragglers` (unfinished groups that it waits for) and
    `unarchived` (groups that must reach the archive first). `waited_s` is the time that a step waited for its batch,
    and `busy_s` the rest of the step's time, in seconds, averaged over the last steps; None before the first step.
    `usual_wait_s` is the median of these waits. `last_step_s` counts the seconds since the last step was trained.
    `rewards` and `response_tokens` describe that step's samples, by task. `report` has the trainer's own facts about
    the step. `place` locates the process that took the run, rank 0; None while unknown.
    """

    trainer_id: str
    epoch: int
    phase: TrainerPhase | None  # None before its first report
    silent_s: float
    lease_left_s: float
    step: int = 0
    for_s: float = 0.0
    ready: Mapping[str, int] = field(default_factory=dict)
    wanted: Mapping[str, int] = field(default_factory=dict)
    stragglers: Mapping[str, int] = field(default_factory=dict)
    unarchived: Mapping[str, int] = field(default_factory=dict)
    busy_s: float | None = None
    waited_s: float | None = None
    usual_wait_s: float | None = None
    last_step_s: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    response_tokens: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    report: Mapping[str, Any] | None = None
    place: Place | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the trainer reported that it ends."""
        return self.phase in ENDED

    @classmethod
    def decode(
        cls, fields: Mapping[str, bytes | None], now_ms: int, report: Mapping[str, Any] | None
    ) -> "TrainerState | None":
        """Decode the state from the trainer's hash fields; returns None before the first trainer."""
        epoch, trainer_id = fields["epoch"], fields["trainer_id"]
        if not epoch or trainer_id is None:
            return None
        said_ms, _, words = (fields["doing"] or b"").partition(b" ")
        said = orjson.loads(words) if words else {}
        lease_left_s = max(0.0, (int(fields["deadline_ms"] or 0) - now_ms) / 1000)
        if said.pop("epoch", None) != int(epoch):  # the previous trainer's report
            lease_s = int(fields["lease_ms"] or 0) / 1000
            return cls(trainer_id.decode(), int(epoch), None, max(0.0, lease_s - lease_left_s), lease_left_s)
        silent_s = max(0.0, (now_ms - int(said_ms)) / 1000)
        phase = TrainerPhase(said.pop("phase"))
        said |= {name: said[name] + silent_s for name in ("for_s", "last_step_s") if name in said}
        return cls(trainer_id.decode(), int(epoch), phase, silent_s, lease_left_s, report=report, **said)
