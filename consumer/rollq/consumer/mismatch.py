"""How far the trainer's logprobs of a batch are from the engine's: by task, worker and version of the weights.

Without faults only rounding, and the updates since a token's version, set them apart. The tokens of a worker
that serves other weights than it says are much further apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.rollouts import Float32Array
from rollq.buffer.shards import task_of
from rollq.consumer.batch import Batch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of n tokens with difference d = trainer's logprob - engine's, in nats, and w = exp(d).

    `mean`, `p99` and `max` are those of |d|. `kl` is the k3 estimator of KL(engine || trainer), the mean of w - d - 1
    (Schulman 2020, "Approximating KL divergence"). `effective_sample_size` is (sum w)^2 / (n sum w^2), in (0, 1] (Kong
    1992); NaN when the w are too large or small for a float64.
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    effective_sample_size: float

    @classmethod
    def of(cls, differences: Float32Array) -> "Mismatch":
        """Of differences float32 [n], n > 0."""
        d = differences.astype(np.float64)
        with np.errstate(over="ignore"):
            w = np.exp(d)
            squares = float((w**2).sum())
        distance = np.abs(d)
        return cls(
            tokens=len(d),
            mean=float(distance.mean()),
            p99=float(np.quantile(distance, 0.99)),
            max=float(distance.max()),
            kl=float((w - d - 1).mean()),
            effective_sample_size=float(w.mean() * (w.sum() / squares)) if 0 < squares < np.inf else np.nan,
        )


class MismatchGauge:
    """Gathers the differences of a batch's loss tokens, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._differences: list[Float32Array] = []
        self._sequences: list[npt.NDArray[np.integer]] = []
        self._versions: list[npt.NDArray[np.integer]] = []

    def add(self, differences: torch.Tensor, sequences: torch.Tensor, versions: torch.Tensor) -> None:
        """Add the loss tokens of a micro-batch, each [n]: trainer's - engine's logprob in nats, index into
        `Batch.sequences`, and version of the weights."""
        self._differences.append(differences.float().cpu().numpy())
        self._sequences.append(sequences.cpu().numpy())
        self._versions.append(versions.cpu().numpy())

    def total(self) -> Mismatch | None:
        """Of all tokens; None without any."""
        differences = np.concatenate([*self._differences, np.zeros(0, np.float32)])
        return Mismatch.of(differences) if len(differences) else None

    def by(self, batch: Batch) -> Mapping[str, Mapping[str, Mismatch]]:
        """Of the tokens of each `task`, `worker` and `version` of the batch that was gauged."""
        found: dict[str, dict[str, Mismatch]] = {"task": {}, "worker": {}, "version": {}}
        if not any(map(len, self._differences)):
            return found
        differences, sequences = np.concatenate(self._differences), np.concatenate(self._sequences)
        versions = np.concatenate(self._versions)
        gauged, index = np.unique(sequences, return_inverse=True)  # those of this rank
        rows = [batch.sequences[one] for one in gauged]
        workers = [str(batch.samples[row.sample].extra.get("worker", "?")) for row in rows]
        labels = {
            "task": np.array([task_of(row.task) for row in rows])[index],
            "worker": np.array(workers)[index],
            "version": versions.astype(str),
        }
        for kind, names in labels.items():
            for name in np.unique(names):
                found[kind][str(name)] = Mismatch.of(differences[names == name])
        return found
