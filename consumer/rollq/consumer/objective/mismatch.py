"""The distance between the trainer's and the engine's logprobs for a batch, by task, worker and weights version.

Without faults, only rounding and the updates since a token's version cause a difference. If a worker serves one version
and reports another, its tokens differ much more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import orjson
import torch
from safetensors.numpy import load, save

from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import Float32Array
from rollq.consumer.batches.batch import Batch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The mismatch of n tokens, with d = the trainer's logprob - the engine's, in nats, and w = exp(d).

    `mean`, `p99` and `max` describe |d|. `kl` is the k3 estimator of KL(engine || trainer), the mean of w - d - 1
    (Schulman 2020, "Approximating KL divergence"). `effective_sample_size` is (sum w)^2 / (n sum w^2), in (0, 1] (Kong
    1992); NaN if a w is too large or small for a float64.
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    effective_sample_size: float

    @classmethod
    def of(cls, differences: Float32Array) -> "Mismatch":
        """The mismatch of the differences float32 [n], n > 0."""
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
        """Add a micro-batch's loss tokens, as arrays [n]: trainer's - engine's logprob in nats, index into
        `Batch.sequences`, and weights version."""
        self._differences.append(differences.float().cpu().numpy())
        self._sequences.append(sequences.cpu().numpy())
        self._versions.append(versions.cpu().numpy())

    def labelled(self, batch: Batch) -> "LabelledMismatch":
        """The differences of the tokens added so far, each with its task, worker and version."""
        differences = np.concatenate([*self._differences, np.zeros(0, np.float32)])
        sequences = np.concatenate([*self._sequences, np.zeros(0, np.int64)])
        versions = np.concatenate([*self._versions, np.zeros(0, np.int64)])
        gauged, index = np.unique(sequences, return_inverse=True)  # only this rank's
        rows = [batch.sequences[int(index)] for index in gauged]
        workers = [str(batch.samples[row.sample].extra.get("worker", "?")) for row in rows]
        labels = {
            "task": np.array([task_of(row.task) for row in rows], np.str_)[index],
            "worker": np.array(workers, np.str_)[index],
            "version": versions.astype(np.str_),
        }
        return LabelledMismatch(differences, labels)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledMismatch:
    """Loss tokens' differences, float32 [n] in nats, and their labels: string arrays [n] by kind."""

    differences: Float32Array
    labels: Mapping[str, npt.NDArray[np.str_]]

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """The combined mismatch of several ranks."""
        return cls(
            np.concatenate([part.differences for part in parts]),
            {kind: np.concatenate([part.labels[kind] for part in parts]) for kind in parts[0].labels},
        )

    def encode(self) -> bytes:
        """The bytes that `decode` reads."""
        arrays, names = {"differences": self.differences}, {}
        for kind, labels in self.labels.items():
            distinct, index = np.unique(labels, return_inverse=True)
            arrays[kind] = index.astype(np.int32)
            names[kind] = orjson.dumps(distinct.tolist()).decode()
        return save(arrays, names)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote."""
        header = orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        arrays = load(data)
        names = header["__metadata__"]
        return cls(
            arrays.pop("differences"),
            {kind: np.array(orjson.loads(names[kind]), np.str_)[index] for kind, index in arrays.items()},
        )

    def total(self) -> Mismatch | None:
        """The mismatch of all tokens; None if there are none."""
        return Mismatch.of(self.differences) if len(self.differences) else None

    def by(self) -> Mapping[str, Mapping[str, Mismatch]]:
        """The mismatch of each `task`, `worker` and `version`."""
        return {
            kind: {str(name): Mismatch.of(self.differences[labels == name]) for name in np.unique(labels)}
            for kind, labels in self.labels.items()
        }
