"""Describes what a step has trained, over all ranks together, for its line of metrics."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.sample_numbers import Numbers, means, together
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.worker_shares import described, samples_by_worker
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.mismatch import LabelledMismatch
from rollq.consumer.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of all ranks on the batch of a step.

    `workers`: how many samples each made, see `samples_by_worker`.
    """

    loss: LossMetrics
    mismatch: LabelledMismatch
    workers: Mapping[str, int]

    @classmethod
    def gather(cls, batch: Batch, mine: LossMetrics, ranks: Ranks) -> Self:
        """Put together what the ranks have measured on their shares. All ranks call it."""
        loss, everywhere = LossMetrics(), Counter[str]()
        for sums, counted in ranks.gather([mine.sums(), samples_by_worker(batch)]):
            loss.add_sums(sums)
            everywhere.update(counted)
        encoded = ranks.gather_bytes(mine.mismatch.labelled(batch).encode())
        return cls(loss, LabelledMismatch.together([LabelledMismatch.decode(data) for data in encoded]), everywhere)

    def result(self) -> dict[str, Any]:
        """Plain numbers. `mismatch` is how far the trainer's logprobs are from the engines'; see `Mismatch`."""
        total = self.mismatch.total()
        by = {
            f"by_{kind}": {name: asdict(mismatch) for name, mismatch in values.items()}
            for kind, values in self.mismatch.by().items()
        }
        return {
            **described(self.workers),
            **self.loss.result(),
            "mismatch": {**({} if total is None else asdict(total)), **by},
        }


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Describe a batch for the metrics of its step."""
    group_tasks = [task_of(name) for name, _ in batch.group_ids]
    tasks = np.array([group_tasks[index] for index in batch.sample_groups])
    rewards = batch.rewards
    by_task: dict[str, list[Numbers]] = {}
    for task, numbers in zip(group_tasks, batch.numbers, strict=False):
        if numbers:
            by_task.setdefault(task, []).append(numbers)
    return {
        "step": batch.step,
        "time_s": time.time(),
        "reward": float(rewards[batch.valid].mean()) if batch.valid.any() else 0.0,
        "rewards": {
            str(task): float(rewards[chosen].mean())
            for task in sorted(set(tasks))
            if (chosen := batch.valid & (tasks == task)).any()
        },
        "parts": {task: means(together(numbers)) for task, numbers in sorted(by_task.items())},
        "groups": batch.counts.groups,
        "samples": batch.counts.samples,
        "prefetched": batch.prefetched,
    }
