"""Handles, stages and results of the batches that `BatchCoordinator` submits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollq.buffer.calls.evaluations import BatchType
from rollq.buffer.errors import ConfigError


class Stage(StrEnum):
    """The state of a batch."""

    PENDING = "pending"  # submitted only partly; submitting it again completes it
    RUNNING = "running"  # its groups are being generated
    FINALIZING = "finalizing"  # a process runs the pipeline on it
    FINALIZED = "finalized"  # its groups may be trained
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """One incarnation of a batch. A reused id gets a new handle."""

    task: str
    batch_id: str
    handle: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of a batch. `finished_task_count` is the number of prompts whose groups finished before the
    batch ended."""

    batch_id: str
    batch_type: BatchType
    finished_task_count: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OverRollout:
    """Ends a batch without its slowest groups, `grace_s` seconds after ceil(size x (1 - `ratio`)) groups have finished.

    With `partial_groups`, slower groups with `min_valid_samples` finished samples count too; their other samples are
    stored as failed. Long samples are then missing more often than short samples. `partial_groups` also applies to
    `min_wait_num` and to an evaluation's timeout, and makes `finalize` take up to five seconds longer. Without
    `min_valid_samples`, it has no effect, since all samples are then needed.

    Raises `ConfigError` for a ratio outside [0, 1).
    """

    ratio: float = 0.0
    grace_s: float = 30.0
    partial_groups: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"over-rollout ratio {self.ratio!r} must be at least 0 and below 1")

    def enough(self, size: int) -> int:
        """How many groups of a batch of `size` must have finished."""
        return math.ceil(size * (1 - self.ratio))
