"""The batch of one train step: identical on every rank; each rank trains its share of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rollq.buffer.advantages import AdvantageSettings, advantages
from rollq.buffer.rollouts import BoolArray, Float32Array, Group, Sample, SampleStatus
from rollq.buffer.samples import Samples
from rollq.buffer.staleness import Floors
from rollq.consumer import packing
from rollq.consumer.sequences import BatchCounts, TokenSequence, TokenStaleness, token_sequences

if TYPE_CHECKING:
    from rollq.consumer.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of train step `step` and their token sequences, for all ranks.

    The flat samples are those of all groups in order, failed ones included, S in total: `rewards` float32 [S] (0 where
    failed), `valid` bool [S], `sample_groups` int64 [S] index into `groups`, `advantages` float32 [S]. `sequences` are
    the segments of the valid samples, of all ranks; `share` and `micro_batches` select those of `rank`. `claim_round`
    names this batch when it is released.
    """

    step: int
    groups: tuple[Group, ...]
    sequences: tuple[TokenSequence, ...]
    rewards: Float32Array
    valid: BoolArray
    sample_groups: npt.NDArray[np.int64]
    advantages: Float32Array
    counts: BatchCounts
    advantage_settings: AdvantageSettings
    rank: int = 0
    world_size: int = 1
    claim_round: int = 0

    @classmethod
    def build(
        cls,
        step: int,
        groups: Sequence[Group],
        *,
        floors: Mapping[str, Floors] | None = None,
        token_thresholds: Mapping[str, int] | None = None,
        settings: AdvantageSettings | None = None,
        rank: int = 0,
        world_size: int = 1,
        claim_round: int = 0,
    ) -> "Batch":
        """Build the batch of `step`.

        `floors` maps a task to the versions that tokens of its dead epochs count as, at most.
        `token_thresholds` maps a task to the staleness, in train steps, from which a token is masked out of the loss.
        """
        settings, flat = settings or AdvantageSettings(), _flatten(groups)
        staleness = _task_staleness(step, groups, floors or {}, token_thresholds or {})
        sequences = token_sequences(groups, flat.valid, staleness)
        computed = advantages(flat.rewards, flat.groups, flat.valid, settings)
        return cls(
            step=step,
            groups=tuple(groups),
            sequences=sequences,
            rewards=flat.rewards,
            valid=flat.valid,
            sample_groups=flat.groups,
            advantages=_pipeline_advantages(computed, groups, flat.valid),
            counts=BatchCounts(
                loss_tokens=sum(int(sequence.loss_mask.sum()) for sequence in sequences),
                samples=int(flat.valid.sum()),
                groups=len(np.unique(flat.groups[flat.valid])),
            ),
            advantage_settings=settings,
            rank=rank,
            world_size=world_size,
            claim_round=claim_round,
        )

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The flat samples, S of them."""
        return tuple(sample for group in self.groups for sample in group.samples)

    @property
    def share(self) -> tuple[int, ...]:
        """Indices into `sequences` of this rank's share; shares are balanced by tokens."""
        return tuple(packing.balance([len(s.ids) for s in self.sequences], self.world_size)[self.rank])

    def with_rewards(self, rewards: npt.ArrayLike) -> "Batch":
        """A copy with other `rewards` [S] and the advantages that follow from them."""
        changed = np.asarray(rewards, dtype=np.float32)
        return replace(
            self,
            rewards=changed,
            advantages=advantages(changed, self.sample_groups, self.valid, self.advantage_settings),
        )

    def micro_batches(self, max_tokens: int, *, padded: bool = False, arrays: Sequence[str] = ()) -> "list[MicroBatch]":
        """Split this rank's share into micro-batches of at most `max_tokens` tokens, equally many on every rank.

        Packed, all sequences of a micro-batch share one row; with `padded`, each has a row, and the number of rows
        times the longest sequence is at most `max_tokens`. `arrays` names the named arrays that hold one value per
        token, see `MicroBatch.arrays`; references among them are loaded. A rank that runs out of sequences gets
        micro-batches of a single masked token.

        Raises `ConfigError` for a sequence longer than `max_tokens`, `InvalidGroup` for a missing or misshapen array,
        `ArrayError` for a reference whose file is missing or was changed.
        """
        lengths = [len(s.ids) for s in self.sequences]
        plan = packing.plan_micro_batches(lengths, self.world_size, max_tokens, padded=padded)
        return [self._assemble(chosen, padded=padded, arrays=arrays) for chosen in plan[self.rank]]

    def to_torch(self, *, arrays: Sequence[str] = ()) -> "MicroBatch":
        """This rank's whole share as one padded micro-batch, one sequence per row, [B, T]."""
        return self._assemble(self.share, padded=True, arrays=arrays)

    def _assemble(self, chosen: Sequence[int], *, padded: bool, arrays: Sequence[str]) -> "MicroBatch":
        from rollq.consumer.micro_batch import assemble  # needs torch

        return assemble(self.sequences, chosen, self.advantages, self.counts, padded=padded, arrays=arrays)


class _FlatSamples(NamedTuple):
    """The samples of all groups in order, S of them.

    `rewards` float32 [S] (0 where not valid), `valid` bool [S], `groups` int64 [S] index into the groups.
    """

    rewards: Float32Array
    valid: BoolArray
    groups: npt.NDArray[np.int64]


def _flatten(groups: Sequence[Group]) -> _FlatSamples:
    columns = [Samples.of(group.samples) for group in groups]
    valid = np.array([is_valid for samples in columns for is_valid in _are_valid(samples)], dtype=np.bool_)
    rewards = np.array(
        [reward or 0.0 for group, samples in zip(groups, columns, strict=True) for reward in _rewards(group, samples)],
        dtype=np.float32,
    )
    owners = np.repeat(np.arange(len(groups)), [len(samples) for samples in columns])
    return _FlatSamples(np.where(valid, rewards, np.float32(0)), valid, owners)


def _task_staleness(
    step: int,
    groups: Sequence[Group],
    floors: Mapping[str, Floors],
    token_thresholds: Mapping[str, int],
) -> dict[str, TokenStaleness]:
    tasks = {group.task for group in groups}
    return {task: TokenStaleness(step, floors.get(task, Floors()), token_thresholds.get(task)) for task in tasks}


def _are_valid(samples: Samples) -> list[bool]:
    found = zip(samples.statuses, samples.rewards, strict=True)
    return [status is SampleStatus.COMPLETED and reward is not None for status, reward in found]


def _rewards(group: Group, samples: Samples) -> Sequence[float | None]:
    """The rewards of a group's samples: the pipeline's if it set any, otherwise the judge's."""
    return group.shaped.rewards if group.shaped else samples.rewards


def _pipeline_advantages(computed: Float32Array, groups: Sequence[Group], valid: BoolArray) -> Float32Array:
    """The `computed` advantages [S], replaced where a pipeline has set them."""
    chosen = computed.copy()
    start = 0
    for group in groups:
        end = start + len(group.samples)
        if group.shaped and group.shaped.advantages is not None:
            chosen[start:end] = np.where(valid[start:end], group.shaped.advantages, 0.0)
        start = end
    return chosen
