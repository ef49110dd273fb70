"""The batch of one train step, identical on every rank. Each rank trains its share."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import numpy.typing as npt

from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.advantages import AdvantageSettings, advantages, draw_weights
from rollq.buffer.rewards.credit import StepKind
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import BoolArray, Float32Array, Group, Sample
from rollq.buffer.values.sample_numbers import Numbers
from rollq.buffer.wire.sample_rows import SampleRows
from rollq.consumer.batches import packing
from rollq.consumer.batches.content import BatchContent, HeldGroups, Reader
from rollq.consumer.batches.group_columns import (
    counts_of,
    pipeline_advantages,
    probability_of,
    segment_lengths,
    task_numbers,
    trained_rewards,
)
from rollq.consumer.batches.group_credit import group_credit
from rollq.consumer.batches.sequences import BatchCounts, Reduction, TokenSequence, TokenStaleness

if TYPE_CHECKING:
    from rollq.consumer.batches.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of train step `step` and their token sequences, for all ranks.

    `samples` holds the samples of all groups in order, including failed samples, S in total, with `rewards` float32 [S]
    (0 where failed), `valid` bool [S], `sample_groups` int64 [S], indices into `groups`, and `advantages` float32 [S].
    `sequences` holds the segments of the valid samples, n over all ranks, with `lengths` int64 [n], in tokens, and
    `sequence_groups` int64 [n], indices into `groups`. `share` and `micro_batches` select the sequences of `rank`.
    `group_ids` holds each group's task or shard and its id. `claim_round` identifies this batch for a release.

    `numbers` holds the numbers of each group's samples (see `rollq.buffer.values.sample_numbers`). `uses` int64 [G]
    counts how often each group was trained before, and `probabilities` float64 [G] holds its probability of being
    drawn, NaN in an order without draws. `AdvantageSettings.draw_correction` sets how the probabilities weight
    advantages (see `draw_weights`). `MicroBatch.staleness` holds the tokens' ages.

    `group_counts` holds each group's counts, and `part` holds the indices of the groups to train: all groups, except in
    batches from `split`. `token_advantages` maps indices into `sequences` to advantages (see `with_token_advantages`).

    `reduction` sets how the ranks combine their gradients (see `loss_scale`).

    Each rank has already read its share. Other items of `groups`, `samples` and `sequences` are read on access, which
    raises `CorruptGroup` for a group that cannot be read, or is gone because a checkpoint covers the step. `prefetched`
    is the fraction of the share's groups that were read before the claim. `unreadable` lists groups of the share that
    could not be read; their sequences are masked.

    A batch that was trained while it filled has several parts, whose groups end before the indices `ends`. Each part is
    divided among the ranks separately. `expected_counts` replace the batch's counts in the micro-batches of such a
    part, since the counts are not known yet; see `BatchStream.finish`.
    """

    step: int
    group_ids: tuple[tuple[str, int], ...]
    content: BatchContent = field(repr=False)
    lengths: npt.NDArray[np.int64]
    rewards: Float32Array
    valid: BoolArray
    advantages: Float32Array
    group_counts: tuple[BatchCounts, ...]
    part: tuple[int, ...]
    advantage_settings: AdvantageSettings
    ends: tuple[int, ...]
    token_advantages: Mapping[int, Float32Array] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    reduction: Reduction = "sum"
    claim_round: int = 0
    prefetched: float = 0.0
    unreadable: tuple[tuple[str, int], ...] = ()
    expected_counts: Mapping[str, BatchCounts] | None = None
    numbers: tuple[Numbers, ...] = ()
    uses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    probabilities: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))

    @classmethod
    def build(
        cls,
        step: int,
        groups: Sequence[Group | ClaimedGroup],
        *,
        reader: Reader | None = None,
        staleness: Sequence[TokenStaleness] | None = None,
        settings: AdvantageSettings | None = None,
        rank: int = 0,
        world_size: int = 1,
        reduction: Reduction = "sum",
        claim_round: int = 0,
        ends: Sequence[int] = (),
        before: BatchContent | None = None,
    ) -> Self:
        """Build the batch of `step` from groups in memory, or from claimed groups, which `reader` reads on access.

        `staleness` gives each group's token ages and masks (default: no token belongs to a dead epoch, and none is
        masked). For a batch that is trained while it fills, `ends` counts the groups up to the end of each part, and
        `before` holds the content of the batch's first groups. Raises `InvalidGroup` for a segment of a group in memory
        that `check_group` would refuse, and the exceptions of `reader`.
        """
        source, settings = reader or HeldGroups(cast("Sequence[Group]", groups)), settings or AdvantageSettings()
        rows = source.rows()
        staleness = [TokenStaleness(step)] * len(groups) if staleness is None else staleness
        valid = _valid(rows)
        trained = np.where(valid, trained_rewards(groups, rows), np.float32(0))
        content = BatchContent(rows, valid, staleness, source.read, before)
        if reader is None:
            content.make_sequences(range(len(groups)))
        group_ids = tuple([(group.task, group.group_id) for group in groups])
        tasks = task_numbers(group_ids)[content.sample_groups]
        lengths = content.sample_tokens
        computed = advantages(trained, content.sample_groups, valid, settings, tasks=tasks, lengths=lengths)
        return cls(
            step=step,
            group_ids=group_ids,
            content=content,
            lengths=segment_lengths(rows),
            rewards=trained,
            valid=valid,
            advantages=pipeline_advantages(computed, groups, content.sample_groups, valid),
            group_counts=tuple(counts_of(*pair) for pair in zip(rows, staleness, strict=True)),
            part=tuple(range(len(groups))),
            advantage_settings=settings,
            ends=(*[end for end in ends if end < len(groups)], len(groups)),
            rank=rank,
            world_size=world_size,
            reduction=reduction,
            claim_round=claim_round,
            numbers=tuple([of_group.numbers for of_group in rows]),
            uses=np.array(list(map(_uses, groups)), np.int64),
            probabilities=np.array(list(map(probability_of, groups)), np.float64),
        )

    @property
    def mean_reward(self) -> float:
        """The mean reward of the valid samples; NaN if there are none. In `rewards`, failed samples have 0."""
        return float(self.rewards[self.valid].mean()) if self.valid.any() else float("nan")

    @property
    def groups(self) -> Sequence[Group]:
        """The groups."""
        return self.content.groups

    @property
    def samples(self) -> Sequence[Sample]:
        """The flat samples of all groups, S in total."""
        return self.content.samples

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The segments of the valid samples, n in total."""
        return self.content.sequences

    @property
    def sample_groups(self) -> npt.NDArray[np.int64]:
        """Each flat sample's index into `groups`, int64 [S]."""
        return self.content.sample_groups

    @property
    def sequence_groups(self) -> npt.NDArray[np.int64]:
        """Each sequence's index into `groups`, int64 [n]."""
        return self.content.sequence_groups

    @property
    def counts(self) -> BatchCounts:
        """The counts of the trained groups, over all ranks."""
        return sum([self.group_counts[index] for index in self.part], BatchCounts())

    @property
    def task_counts(self) -> dict[str, BatchCounts]:
        """The counts by task, ordered by task name: the denominators if tasks have different losses."""
        counts: dict[str, BatchCounts] = {}
        for index in self.part:
            task = task_of(self.group_ids[index][0])
            counts[task] = counts.get(task, BatchCounts()) + self.group_counts[index]
        return dict(sorted(counts.items()))

    @property
    def task_rewards(self) -> dict[str, float]:
        """The mean reward of each task's valid samples, ordered by task name, without tasks that have none."""
        tasks = np.array([task_of(self.group_ids[index][0]) for index in self.sample_groups])
        means = {task: self.rewards[self.valid & (tasks == task)] for task in sorted(set(tasks.tolist()))}
        return {task: float(rewards.mean()) for task, rewards in means.items() if len(rewards)}

    @property
    def draw_weights(self) -> Float32Array:
        """The factor for each group's advantages, float32 [G], see `AdvantageSettings.draw_correction`."""
        correction = self.advantage_settings.draw_correction
        if not correction:
            return np.ones(len(self.group_ids), np.float32)
        return draw_weights(self.probabilities, task_numbers(self.group_ids), correction)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: 1 if the ranks' gradients are summed, `world_size` if they are averaged. Either way,
        `reduction` then yields the whole batch's gradients."""
        return float(self.world_size) if self.reduction == "mean" else 1.0

    @property
    def share_samples(self) -> Iterator[Sample]:
        """The samples of the groups that this rank reads."""
        return (sample for index in self.share_groups for sample in self.groups[index].samples)

    @property
    def share(self) -> tuple[int, ...]:
        """Indices into `sequences` of this rank's share: whole groups, balanced by tokens (see `share_out`)."""
        return tuple(self._shares()[self.rank])

    @property
    def share_groups(self) -> tuple[int, ...]:
        """Indices of the `groups` that this rank reads: the trained groups, or the rank's share of them."""
        if self.world_size == 1:
            return self.part
        return tuple(np.unique(self.sequence_groups[list(self.share)]).tolist())

    def _shares(self) -> list[list[int]]:
        shares = packing.share_out_parts(
            self.lengths.tolist(),
            self.content.sequence_samples.tolist(),
            self.sequence_groups.tolist(),
            self.ends,
            self.world_size,
        )
        if len(self.part) == len(self.group_ids):
            return shares
        trained, owners = set(self.part), self.sequence_groups.tolist()
        return [[sequence for sequence in share if owners[sequence] in trained] for share in shares]

    def split(self, parts: int) -> "list[Batch]":
        """Divide the batch for several optimizer steps, into `parts` batches that each train a part of the groups.

        Part k trains the groups k, k + parts, ..., with the counts of these groups and the advantages of the whole
        batch. Each rank keeps its groups. All parts belong to this step: compute the old logprobs of all parts before
        the first update, and publish and commit once, after the last. Indices refer to the whole batch.

        Raises `ConfigError` for fewer groups than parts.
        """
        if not 1 <= parts <= len(self.part):
            raise ConfigError(
                f"split({parts!r}): the batch of step {self.step} has {len(self.part)} groups, and every part needs one"
            )
        return [replace(self, part=self.part[first::parts]) for first in range(parts)]

    def with_token_advantages(self, advantages: Mapping[int, npt.ArrayLike]) -> "Batch":
        """A copy with an advantage for each token of these sequences; other tokens keep their sample's advantage.

        `advantages` maps an index into `sequences` to one advantage per token of the sequence, prompt included, float32
        [L]. Raises `ValueError` for a wrong shape or a value that is not finite.
        """
        added = {index: np.asarray(values, dtype=np.float32) for index, values in advantages.items()}
        for index, values in added.items():
            if values.shape != (self.lengths[index],) or not np.isfinite(values).all():
                raise ValueError(
                    f"sequence {index} needs {self.lengths[index]} finite advantages, one per token of prompt and "
                    f"response, not an array of shape {values.shape}"
                )
        return replace(self, token_advantages={**self.token_advantages, **added})

    def with_credit(self, kind: StepKind = "turns", *, discount: float = 1.0, without: Collection[str] = ()) -> "Batch":
        """A copy whose token advantages come from the named array `token_rewards`.

        `kind` is the unit that has a return, and `discount` weights the next return. `rollq.consumer.token_advantages`
        compares the samples of each group. Groups of the tasks in `without` keep their samples' advantages. Only
        sequences of groups in this rank's share are changed.

        Raises `InvalidGroup`, naming the task, for a sample without the array or with a misshapen one, and for rewards
        of a pipeline; `ConfigError` if `advantage_settings` take means of the batch; `ArrayError` for a reference that
        cannot be loaded.
        """
        by_sequence: dict[int, npt.ArrayLike] = {}
        for index in self.share_groups:
            if task_of(self.group_ids[index][0]) not in without:
                valid = self.valid[self.sample_groups == index]
                credit = group_credit(self.groups[index], valid, self.advantage_settings, kind, discount)
                by_sequence.update(zip(np.flatnonzero(self.sequence_groups == index).tolist(), credit, strict=True))
        return self.with_token_advantages(by_sequence)

    def with_rewards(self, rewards: npt.ArrayLike) -> "Batch":
        """A copy with these `rewards` [S] and the resulting advantages, equal for all tokens of a sample."""
        changed = np.asarray(rewards, dtype=np.float32)
        return replace(
            self,
            rewards=changed,
            token_advantages={},
            advantages=advantages(
                changed,
                self.sample_groups,
                self.valid,
                self.advantage_settings,
                tasks=task_numbers(self.group_ids)[self.sample_groups],
                lengths=self.content.sample_tokens,
            ),
        )

    def micro_batches(
        self,
        max_tokens: int,
        *,
        count: int | None = None,
        padded: bool = False,
        arrays: Sequence[str] = (),
        whole_samples: bool = False,
    ) -> "list[MicroBatch]":
        """Split this rank's share into micro-batches of at most `max_tokens` tokens. Every rank gets the same number.

        With `count`, each rank gets exactly `count`, for trainers that accumulate gradients a fixed number of times.

        Packed, all sequences of a micro-batch share one row; with `padded`, each has a row, and the number of rows
        times the longest sequence is at most `max_tokens`. `arrays` lists named arrays with one value per token (see
        `MicroBatch.arrays`); references among them are loaded. A rank without further sequences gets micro-batches of a
        single masked token.

        A sample's segments share a micro-batch if they fit. Ratios of whole samples require this, so `whole_samples`
        refuses a sample that does not fit.

        Raises `ConfigError` for a sequence, or a sample, longer than `max_tokens`, and if `count` is too small;
        `InvalidGroup` for a missing or misshapen array, `ArrayError` for a reference whose file is missing or has
        changed.
        """
        plan = packing.plan_micro_batches(
            self.lengths.tolist(),
            self.content.sequence_samples.tolist(),
            self._shares(),
            max_tokens,
            padded=padded,
            count=count,
            whole_samples=whole_samples,
        )
        return [self._assemble(chosen, padded=padded, arrays=arrays) for chosen in plan[self.rank]]

    def to_torch(self, *, arrays: Sequence[str] = ()) -> "MicroBatch":
        """This rank's whole share as one padded micro-batch, one sequence per row, [B, T]."""
        return self._assemble(self.share, padded=True, arrays=arrays)

    def _assemble(self, chosen: Sequence[int], *, padded: bool, arrays: Sequence[str]) -> "MicroBatch":
        from rollq.consumer.batches.micro_batch import assemble  # needs torch

        weights = self.draw_weights
        return assemble(
            self.sequences,
            chosen,
            [self._advantages_of(index, weights) for index in chosen],
            self.task_counts if self.expected_counts is None else self.expected_counts,
            padded=padded,
            arrays=arrays,
            loss_scale=self.loss_scale,
        )

    def _advantages_of(self, sequence: int, weights: Float32Array) -> Float32Array:
        """The advantages of a sequence's tokens, float32 [L], times the weight of its group's draw."""
        weight: np.float32 = weights[self.content.sequence_groups[sequence]]
        if (per_token := self.token_advantages.get(sequence)) is not None:
            return np.asarray(per_token * weight, np.float32)
        advantage = self.advantages[self.content.sequence_samples[sequence]] * weight
        return np.full(self.lengths[sequence], advantage, np.float32)


def _valid(rows: Sequence[SampleRows]) -> BoolArray:
    return np.array([reward is not None for of_group in rows for reward in of_group.rewards], dtype=np.bool_)


def _uses(group: Group | ClaimedGroup) -> int:
    return group.uses if isinstance(group, ClaimedGroup) else 0
