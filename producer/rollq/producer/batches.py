"""Handles, stages and results of the batches that `BatchCoordinator` submits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollq.buffer.calls.evaluations import BatchType
from rollq.buffer.errors import ConfigError


class Stage(StrEnum):
    """The state of a batch."""

    PENDING = "pending"  # submitted in part; submitting it again completes it
    RUNNING = "running"  # its groups are generated
    FINALIZING = "finalizing"  # a process runs the pipeline on it
    FINALIZED = "finalized"  # its groups may be trained
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """One incarnation of a batch: a reused id gets another handle."""

    task: str
    batch_id: str
    handle: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of a batch. `finished_task_count` is the number of prompts whose groups finished before its end."""

    batch_id: str
    batch_type: BatchType
    finished_task_count: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OverRollout:
    """Ends a batch without its slowest groups: `grace_s` seconds after ceil(size x (1 - `ratio`)) groups have finished.

    `partial_groups`: of the others, count those too that have `min_valid_samples` finished samples; the rest of their
    samples are stored as failed. Long samples are then missing more often than short ones. This also holds for
    `min_wait_num` and for an evaluation's timeout, and makes `finalize` take up to five seconds longer. It does nothing
    where `min_valid_samples` is not set, since all samples are needed then.

    Raises `ConfigError` for a ratio outside [0, 1).
    """

    ratio: float = 0.0
    grace_s: float = 30.0
    partial_groups: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"over-rollout ratio {self.ratio!r} must be at least 0 and below 1")

    def enough(self, size: int) -> int:
        """Number of groups that must have finished in a batch of `size`."""
        return math.ceil(size * (1 - self.ratio))
