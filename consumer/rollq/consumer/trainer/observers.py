"""The events of a trainer, and its observers, which warn, record and report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollq.consumer.batches.batch import Batch
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.trainer.step_metrics import StepMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Update:
    """A batch has updated the weights. The weights are not published yet, and the batch is not committed. `own` has the
    metrics of this rank's share, and `metrics` covers all ranks. `norms` holds each optimizer step's gradient norm.
    `changed` is the share of the trained numbers that differ from before.
    """

    batch: Batch
    own: LossMetrics
    metrics: StepMetrics
    norms: Sequence[float]
    changed: float
    learning_rate: float


class Observer:
    """Receives a trainer's events. Methods have no effect unless overridden. An exception from a method stops training.

    All ranks call the first three methods, at the same points of a step. Only rank 0 calls the others.
    """

    def on_batch(self, batch: Batch) -> None:
        """A batch has arrived and is trained next."""

    def on_update(self, update: Update) -> None:
        """The weights were updated by a batch."""

    def on_publish(self, epoch: int, version: int, model: "PreTrainedModel") -> None:
        """The weights of `model` are live as `version`. Also called for the initial weights."""

    def on_step(self, line: Mapping[str, Any], batch: Batch) -> None:
        """A step is committed. `line` has its metrics."""

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        """The live weights were evaluated."""
