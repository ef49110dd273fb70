"""A group's rows: the data that every trainer rank needs about each sample, without tokens.

A claim returns its groups' rows. From these, all ranks compute the same rewards, advantages, counts and shares; only
the ranks that train a group read its tokens.

In Redis the rows are JSON, by column: `[rewards, lengths, [[epoch, version, loss tokens of each sample...], ...],
labelled, numbers]`. A length is a number, or a list for a sample with several sequences. `numbers` is left out if
there are none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import orjson

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.rules.staleness import brings_labels
from rollq.buffer.values.rollouts import NO_EPOCH, NO_VERSION, SampleStatus, Segment
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.values.sample_numbers import Numbers

Weights = tuple[int, int]
"""Epoch and version."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """A group's rows. Each field has an entry per sample.

    `rewards` holds the samples' rewards, None for a sample that is not trained because it failed. `lengths` counts
    prompt and response tokens, for each segment that has any. `loss_tokens` counts the tokens that the loss may count,
    by the weights (epoch, version) that made them; inserted tokens are under (`NO_EPOCH`, `NO_VERSION`). A `labelled`
    sample brings its own labels, and its tokens count at any age. `rollq.buffer.values.sample_numbers` describes
    `numbers`.
    """

    rewards: tuple[float | None, ...]
    lengths: tuple[tuple[int, ...], ...]
    loss_tokens: Mapping[Weights, tuple[int, ...]]
    labelled: tuple[bool, ...]
    numbers: Numbers = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, samples: Samples, numbers: Numbers = MappingProxyType({})) -> Self:
        """The rows of samples that have passed `check_group`."""
        outcomes = zip(samples.statuses, samples.rewards, strict=True)
        rewards = [reward if status is SampleStatus.COMPLETED else None for status, reward in outcomes]
        trained = [
            of_sample if reward is not None else () for of_sample, reward in zip(samples.segments, rewards, strict=True)
        ]
        lengths = [
            tuple([length for segment in of_sample if (length := len(segment.prompt_ids) + len(segment.response_ids))])
            for of_sample in trained
        ]
        loss_tokens = _loss_tokens_by_weights(trained)
        return cls(tuple(rewards), tuple(lengths), loss_tokens, tuple(map(brings_labels, trained)), numbers)

    def encode(self) -> bytes:
        """The rows as Redis holds them."""
        lengths = [of_sample[0] if len(of_sample) == 1 else of_sample for of_sample in self.lengths]
        loss_tokens = [[*weights, *counted] for weights, counted in self.loss_tokens.items()]
        labelled = [index for index, is_labelled in enumerate(self.labelled) if is_labelled]
        numbers = [self.numbers] if self.numbers else []
        return orjson.dumps([self.rewards, lengths, loss_tokens, labelled, *numbers])

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Decode rows that `encode` wrote. Raises `CorruptFrame` for anything else."""
        try:
            rewards, lengths, loss_tokens, labelled, *numbers = orjson.loads(encoded)
            rows = cls(
                tuple(map(_number, rewards)),
                tuple([(of_sample,) if type(of_sample) is int else tuple(of_sample) for of_sample in lengths]),
                {(epoch, version): tuple(counted) for epoch, version, *counted in loss_tokens},
                tuple([index in labelled for index in range(len(rewards))]),
                {
                    name: tuple(map(_number, values))
                    for of_sample in numbers
                    for name, values in dict(of_sample).items()
                },
            )
            rows._check()
        except (TypeError, ValueError) as error:
            raise CorruptFrame(f"rows of {len(encoded)} bytes cannot be read: {error}") from error
        return rows

    def _check(self) -> None:
        """Raise `ValueError` unless every column has an entry per sample, and all counts are whole numbers."""
        weights = [one for one in self.loss_tokens if one != (NO_EPOCH, NO_VERSION)]
        counts = [*chain(*self.lengths), *chain(*weights), *chain(*self.loss_tokens.values())]
        if counts and (set(map(type, counts)) != {int} or min(counts) < 0):
            raise ValueError("a count is not a whole number")
        columns = (self.lengths, *self.loss_tokens.values(), *self.numbers.values())
        if {len(column) for column in columns} - {len(self.rewards)}:
            raise ValueError(f"{len(self.rewards)} samples, and a column that is longer or shorter")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _loss_tokens_by_weights(samples: Sequence[Sequence[Segment]]) -> dict[Weights, tuple[int, ...]]:
    """Each sample's number of loss tokens, by the weights that made them."""
    by_weights: dict[Weights, list[int]] = {}
    for index, of_sample in enumerate(samples):
        for segment in of_sample:
            mask, start = segment.loss_mask, 0
            for epoch, version, tokens in segment.versions:
                counted = tokens if mask is None else int(np.count_nonzero(mask[start : start + tokens]))
                by_weights.setdefault((epoch, version), [0] * len(samples))[index] += counted
                start += tokens
    return {weights: tuple(counted) for weights, counted in by_weights.items()}
