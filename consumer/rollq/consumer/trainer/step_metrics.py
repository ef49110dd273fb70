"""Describes a trained step over all ranks, for its line of metrics."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rollq.buffer.rewards.advantages import no_advantage
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.sample_numbers import Numbers, means, together
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.response_lengths import Lengths, described_lengths, response_lengths
from rollq.consumer.batches.worker_shares import described, samples_by_worker
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.mismatch import LabelledMismatch
from rollq.consumer.trainer.ranks import Ranks

SMALL_ERROR = 0.05
"""In nats. The engines serve the live weights if no logprob of a token of these weights differs from the trainer's by
more."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """All ranks' metrics for a step's batch.

    `workers` counts each worker's samples (see `samples_by_worker`); `lengths` holds the response lengths, by rank.
    """

    loss: LossMetrics
    mismatch: LabelledMismatch
    workers: Mapping[str, int]
    lengths: Sequence[Lengths]

    @classmethod
    def gather(cls, batch: Batch, mine: LossMetrics, ranks: Ranks) -> Self:
        """Combine the measurements of all ranks. All ranks call it."""
        loss, everywhere, lengths = LossMetrics(), Counter[str](), list[Lengths]()
        for sums, counted, of_rank in ranks.gather([mine.sums(), samples_by_worker(batch), response_lengths(batch)]):
            loss.add_sums(sums)
            everywhere.update(counted)
            lengths.append(of_rank)
        encoded = ranks.gather_bytes(mine.mismatch.labelled(batch).encode())
        mismatch = LabelledMismatch.together([LabelledMismatch.decode(data) for data in encoded])
        return cls(loss, mismatch, everywhere, lengths)

    def result(self) -> dict[str, Any]:
        """Plain numbers. `mismatch` is the distance between the trainer's and the engines' logprobs; see `Mismatch`."""
        total = self.mismatch.total()
        by = {
            f"by_{kind}": {name: asdict(mismatch) for name, mismatch in values.items()}
            for kind, values in self.mismatch.by().items()
        }
        return {
            **described(self.workers),
            **described_lengths(self.lengths),
            **self.loss.result(),
            "mismatch": {**({} if total is None else asdict(total)), **by},
        }


def likely_causes(on_policy_error: float) -> str:
    """The likely reasons why the trainer's logprobs are far from the engines', likeliest first. `on_policy_error` is
    the largest difference for a token of the live weights, in nats; 0 without such a token.
    """
    causes = ["the engines serve weights other than those they report", "the learning rate is far too high"]
    return ", or ".join(causes[::-1] if 0 < on_policy_error < SMALL_ERROR else causes)


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Describe a batch for the metrics of its step."""
    group_tasks = [task_of(name) for name, _ in batch.group_ids]
    rewards = batch.rewards
    by_task: dict[str, list[Numbers]] = {}
    for task, numbers in zip(group_tasks, batch.numbers, strict=False):
        if numbers:
            by_task.setdefault(task, []).append(numbers)
    return {
        "step": batch.step,
        "time_s": time.time(),
        "reward": float(rewards[batch.valid].mean()) if batch.valid.any() else 0.0,
        "rewards": batch.task_rewards,
        **_equal_groups(batch),
        "parts": {task: means(together(numbers)) for task, numbers in sorted(by_task.items())},
        "groups": batch.counts.groups,
        "samples": batch.counts.samples,
        "prefetched": batch.prefetched,
    }


def _equal_groups(batch: Batch) -> dict[str, float]:
    """The share of groups whose samples have equal rewards; empty if every sample failed."""
    rewards: dict[int, list[float]] = {}
    groups = batch.sample_groups[batch.valid].tolist()
    for group, reward in zip(groups, batch.rewards[batch.valid].tolist(), strict=True):
        rewards.setdefault(group, []).append(reward)
    equal = sum(map(no_advantage, rewards.values()))
    return {"frac_reward_zero_std": equal / len(rewards)} if rewards else {}
