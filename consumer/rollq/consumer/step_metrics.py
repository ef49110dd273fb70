"""Describes what a step has trained, for its line of metrics: that of all ranks together."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from rollq.buffer.shards import task_of
from rollq.consumer.batch import Batch
from rollq.consumer.metrics import LossMetrics
from rollq.consumer.mismatch import LabelledMismatch
from rollq.consumer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of all ranks on the batch of a step.

    `workers`: how many samples each made. Inserted samples have no worker.
    """

    loss: LossMetrics
    mismatch: LabelledMismatch
    workers: Mapping[str, int]

    @classmethod
    def gather(cls, batch: Batch, mine: LossMetrics, ranks: Ranks) -> Self:
        """Put together what the ranks have measured on their shares. All ranks call it."""
        mine_alone = {batch.sequences[index].sample for index in batch.share}  # a group may be shared by ranks
        sampled = [batch.samples[index] for index in sorted(mine_alone) if not batch.samples[index].is_inserted]
        workers = Counter(str(sample.extra.get("worker", "?")) for sample in sampled)
        loss, everywhere = LossMetrics(), Counter[str]()
        for sums, counted in ranks.gather([mine.sums(), workers]):
            loss.add_sums(sums)
            everywhere.update(counted)
        encoded = ranks.gather_bytes(mine.mismatch.labelled(batch).encode())
        return cls(loss, LabelledMismatch.together([LabelledMismatch.decode(data) for data in encoded]), everywhere)

    def result(self) -> dict[str, Any]:
        """Plain numbers. `mismatch` is how far the trainer's logprobs are from the engines'; see `Mismatch`."""
        total = self.mismatch.total()
        by = {
            f"by_{kind}": {name: asdict(one) for name, one in found.items()}
            for kind, found in self.mismatch.by().items()
        }
        return {
            "workers": dict(self.workers),
            **self.loss.result(),
            "mismatch": {**({} if total is None else asdict(total)), **by},
        }


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Describe a batch for the metrics of its step."""
    group_tasks = [task_of(name) for name, _ in batch.group_ids]
    tasks = np.array([group_tasks[index] for index in batch.sample_groups])
    rewards = batch.rewards
    return {
        "step": batch.step,
        "time_s": time.time(),
        "reward": float(rewards[batch.valid].mean()) if batch.valid.any() else 0.0,
        "rewards": {
            str(task): float(rewards[chosen].mean())
            for task in sorted(set(tasks))
            if (chosen := batch.valid & (tasks == task)).any()
        },
        "groups": batch.counts.groups,
        "samples": batch.counts.samples,
        "prefetched": batch.prefetched,
    }
