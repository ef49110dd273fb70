"""Staleness: how old tokens, samples and groups are, and what is too old to be trained. Pure arithmetic.

Versions count train steps: version v names the weights published after step v. A token of version v that is trained at
step t has staleness t - v - 1: how many steps its weights are behind. After a rewind, a dead epoch's tokens count as if
`min(version, floor)` had made them (see `Floors`). Other functions take versions already counted in this way.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.rollouts import BoolArray, Int32Array, Segment


@dataclass(frozen=True, slots=True)
class Floors:
    """The highest versions that tokens of dead epochs count as. `caps` holds pairs (epoch, floor) in ascending order. A
    pair applies to its epoch and to earlier epochs that no earlier pair covers. Tokens of later epochs belong to the
    live epoch and count unchanged.
    """

    caps: tuple[tuple[int, int], ...] = ()

    def encode(self) -> str:
        """The text that `decode` reads."""
        return ",".join(f"{epoch}:{floor}" for epoch, floor in self.caps)

    @classmethod
    def decode(cls, text: str) -> Self:
        """Parse the floors from `epoch:floor,...`, as the functions write them."""
        pairs = (entry.split(":") for entry in text.split(",") if entry)
        return cls(tuple((int(epoch), int(floor)) for epoch, floor in pairs))

    def counted(self, epoch: int, version: int) -> int:
        """The version that a token of `version`, made in `epoch`, counts as."""
        for last, floor in self.caps:
            if epoch <= last:
                return min(version, floor)
        return version


def held_versions(letters: str, versions: str) -> list[int]:
    """The versions of a group's samples, from the samples' letters and the versions as the functions write them;
    without samples that are pending or have no tokens."""
    pairs = zip(letters, versions.split(","), strict=False)
    return [int(version) for letter, version in pairs if letter != "p" and version != "-"]


def stale_threshold(syncs: int, sync_weights_interval: int) -> int:
    """The lowest staleness, in train steps, at which a token is too old if it may be `syncs` synchronisations old.

    Raises `ValueError` for a negative number of syncs or an interval below 1.
    """
    if syncs < 0:
        raise ValueError(f"max_staleness = {syncs}: must be 0 or more")
    if sync_weights_interval <= 0:
        raise ValueError(f"sync_weights_interval = {sync_weights_interval}: must be 1 or more")
    return (syncs + 1) * sync_weights_interval


def staleness(step: int, versions: Iterable[int]) -> int:
    """The staleness, at train step `step`, of the oldest token with one of these versions; 0 without tokens."""
    oldest = min(versions, default=None)
    return 0 if oldest is None else step - oldest - 1


def counted_version(oldest: int, newest_trainable: int, threshold: int, token_threshold: int) -> int:
    """The one version that a sample counts as, so that a single comparison decides whether it is too old.

    A sample is too old if its oldest token is at least `threshold` steps stale. It is also too old if even its newest
    token in the loss is at least `token_threshold` steps stale, since all tokens would be masked. `token_threshold` is
    at most `threshold`. The result may be negative.
    """
    return min(oldest, newest_trainable + token_threshold - threshold)


def token_mask(step: int, versions: Int32Array | npt.NDArray[np.int64], token_threshold: int) -> BoolArray:
    """Bool [T], from int [T] `versions`: which tokens are young enough to count in the loss at `step`."""
    return np.asarray(step - versions - 1 < token_threshold)


def brings_labels(segments: Iterable[Segment]) -> bool:
    """Whether a sample brings its own labels, as an agent's sample does. Its tokens are then never masked by age."""
    return any("labels" in segment.arrays for segment in segments)
