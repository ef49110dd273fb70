"""Describes the batch of a step, for its line of metrics."""

import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from rollq.buffer.shards import task_of
from rollq.consumer.batch import Batch
from rollq.consumer.metrics import LossMetrics


def find_truncation(batch: Batch) -> str | None:
    """A warning if samples were drawn with top_p or top_k, which the trainer's logprobs do not include."""
    for sample in batch.share_samples:
        top_p, top_k = sample.sampling.get("top_p", 1.0), sample.sampling.get("top_k", 0)
        if top_p < 1 or top_k > 0:
            return (
                f"step {batch.step}: samples were drawn with top_p = {top_p}, top_k = {top_k}. Their behaviour "
                "logprobs are those of the truncated distribution, the trainer's are not, so importance ratios are too "
                "small. Use top_p = 1 and top_k = 0 for training, and other values only for evaluations"
            )
    return None


def find_idle_tasks(batch: Batch) -> list[str]:
    """Tasks of which the share has inserted groups, none with an advantage: a loss that multiplies by advantages learns
    nothing from them."""
    largest: dict[str, float] = {}
    for index in batch.share_groups:
        group = batch.groups[index]
        if any(sample.is_inserted for sample in group.samples):
            task = task_of(group.task)
            found = float(np.abs(batch.advantages[batch.sample_groups == index]).max())
            largest[task] = max(largest.get(task, 0.0), found)
    return [task for task, found in largest.items() if not found]


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Describe a batch for the metrics of its step. `workers`: how many samples of the share each made; nobody of the
    run has made those that were inserted."""
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
        "workers": dict(
            Counter(str(sample.extra.get("worker", "?")) for sample in batch.share_samples if not sample.is_inserted)
        ),
    }


def describe_mismatch(batch: Batch, metrics: LossMetrics) -> dict[str, Any]:
    """Describe how far the trainer's logprobs are from the engines', for the metrics of a step; see `Mismatch`."""
    total = metrics.mismatch.total()
    by = {
        f"by_{kind}": {name: asdict(one) for name, one in found.items()}
        for kind, found in metrics.mismatch.by(batch).items()
    }
    return {**({} if total is None else asdict(total)), **by}
