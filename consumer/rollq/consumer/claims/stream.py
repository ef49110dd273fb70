"""`BatchStream`: the micro-batches of a step while its batch fills.

Invariant: every rank, and every trainer that takes over, gets the same parts of the batch in the same order, and thus
the same number of micro-batches. The loss divides by the counts of the whole batch. These are unknown before its end,
so micro-batches have expected counts, and `finish` corrects the gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.shards import task_of
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.sequences import BatchCounts
from rollq.consumer.losses.kinds import Aggregation
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.settings import ConsumerSettings

if TYPE_CHECKING:
    from rollq.consumer.batches.micro_batch import MicroBatch


class BatchStream(Iterator["MicroBatch"]):
    """Iterate over it for this rank's micro-batches. Each iteration waits until every rank has enough groups for a
    micro-batch.

    `part` is the part of the last micro-batch: the groups that arrived since the previous part, with the whole batch's
    indices. `batch` is the whole batch, None until all its micro-batches were taken. It stays None if the iteration
    ends because the consumer was stopped or production has ended: then there is nothing to train, and the caller must
    drop the gradients.

    Leaving the loop early keeps the step's groups: a trainer that asks for the step again, even after a crash, gets the
    same parts from the first one on. `Consumer.release` of `part` gives them up.
    """

    def __init__(
        self,
        parts: Iterator[tuple[Batch | None, Batch | None]],
        aggregation: Aggregation,
        micro_batches: "Callable[[Batch], Sequence[MicroBatch]]",
    ) -> None:
        """Use `Consumer.stream`. `parts` are parts of a batch; the whole batch comes with or after the last part."""
        self._source = parts
        self._aggregation = aggregation
        self._micro_batches = micro_batches
        self._iterator = self._unfold()
        self._expected: Mapping[str, BatchCounts] = {}
        self.part: Batch | None = None
        self.batch: Batch | None = None

    def __next__(self) -> "MicroBatch":
        return next(self._iterator)

    def _unfold(self) -> "Iterator[MicroBatch]":
        for part in self.parts():
            yield from self._micro_batches(part)

    def parts(self) -> Iterator[Batch]:
        """The parts, for loops that make their own micro-batches: `part.micro_batches(...)`.

        The `micro_batches` of a part contain only its groups.
        """
        for part, whole in self._source:
            if part is not None:
                self.part, self._expected = part, part.expected_counts or {}
                yield part
            self.batch = whole

    @property
    def gradient_scale(self) -> float:
        """The factor that turns the accumulated gradients into the whole batch's gradients.

        Raises `ConfigError` before the end of the stream.
        """
        if self.batch is None:
            raise ConfigError("the batch is not whole: iterate over the stream to its end, or drop the gradients")
        return gradient_scale(self._expected, self.batch.task_counts, self._aggregation)

    def finish(self, parameters: Iterable[Any]) -> float:
        """Turn the accumulated gradients of these torch parameters into the whole batch's gradients, in place.

        Call it once, after the last micro-batch, and before the gradients are clipped. Returns the factor, for scaling
        a sum of losses too. Raises `ConfigError` before the end of the stream.
        """
        scale = self.gradient_scale
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return scale


def why_whole(settings: ConsumerSettings, loss: LossSettings) -> str | None:
    """The reason why batches cannot be trained while they fill, as a sentence; None if they can. Pure."""
    if "batch" in (settings.advantages.baseline, settings.advantages.scale):
        return (
            'advantages with baseline or scale = "batch" need the whole batch, which a stream does not have: take '
            'whole batches, or compare within groups (baseline = "group")'
        )
    if settings.colocated:
        return "colocated engines sleep while the trainer trains, so no batch fills during training: take whole batches"
    if loss.components:
        return (
            f"the loss has other denominators for the tasks {sorted(loss.components)!r} (sft, distillation), which are "
            "known only at the end of a batch: take whole batches"
        )
    return None


def expected_counts(
    first: Mapping[str, BatchCounts], groups: int, planned: Mapping[str, int]
) -> dict[str, BatchCounts]:
    """Estimated counts of a batch with `planned` groups per task, if all are like the `groups` groups of the `first`
    part.

    Pure: the same on every rank, and exact for a part that is the whole batch.
    """
    factor = sum(planned.values()) / groups
    by_task = {}
    for task in sorted({task_of(name) for name in planned}):
        counts = first.get(task, BatchCounts())
        by_task[task] = BatchCounts(
            round(factor * counts.loss_tokens), round(factor * counts.samples), round(factor * counts.groups)
        )
    return by_task


def gradient_scale(
    expected: Mapping[str, BatchCounts], counted: Mapping[str, BatchCounts], aggregation: Aggregation
) -> float:
    """The factor that converts a loss divided by the `expected` counts to a loss divided by the `counted` counts."""
    return _denominator(expected, aggregation) / _denominator(counted, aggregation)


def _denominator(counts: Mapping[str, BatchCounts], aggregation: Aggregation) -> int:
    total = sum(counts.values(), BatchCounts())
    return max(total.loss_tokens if aggregation == "token" else total.samples, 1)
