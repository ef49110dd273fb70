"""How many samples of a batch each worker made, for metrics and monitors.

Each sample names its worker in `extra`, which training has already read for the mismatch by worker.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollq.buffer.values.rollouts import Sample
from rollq.consumer.batches.batch import Batch

MOST_NAMED = 20
"""At most this many workers are named, those with the most samples first. The others are counted together."""
INSERTED = ""
"""Replaces a worker's name for samples that no worker made."""


def samples_by_worker(batch: Batch) -> Counter[str]:
    """How many trained samples in this rank's share each worker made."""
    samples = trained_samples(batch)
    return Counter(INSERTED if sample.is_inserted else str(sample.extra.get("worker", "?")) for sample in samples)


def trained_samples(batch: Batch) -> list[Sample]:
    """The trained samples in this rank's share."""
    of_rank = sorted({batch.sequences[index].sample for index in batch.share})  # a group may be shared by ranks
    return [batch.samples[index] for index in of_rank]


def described(samples: Mapping[str, int]) -> dict[str, Any]:
    """All ranks' counts as facts about a step.

    `workers` maps workers to numbers of samples. If there are any, `other_samples` counts the samples of unnamed
    workers, and `inserted_samples` counts samples without a worker.
    """
    made = Counter({name: count for name, count in samples.items() if name != INSERTED})
    named = dict(made.most_common(MOST_NAMED))
    others, inserted = made.total() - sum(named.values()), samples.get(INSERTED, 0)
    return {
        "workers": named,
        **({"other_samples": others} if others else {}),
        **({"inserted_samples": inserted} if inserted else {}),
    }
