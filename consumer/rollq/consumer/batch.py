"""The batch of one train step: the same on every rank; each rank trains its own share of it.

Alignment, everywhere in this package: entry t of a per-token array belongs to token t of the sequence, so
`logprobs[t]` is the logprob of `ids[t]` given `ids[:t]` (predicted by the model's output at t - 1). `loss_mask` is
False on prompts, on what the environment wrote, and on the first token of a sequence, which nothing predicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollq.buffer.advantages import AdvantageSettings, advantages
from rollq.buffer.rollouts import (
    BoolArray,
    Float32Array,
    Group,
    Int32Array,
    NamedArrays,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.staleness import brings_labels, token_mask
from rollq.consumer import packing

if TYPE_CHECKING:
    from rollq.consumer.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One segment of a sample as the model reads it: prompt, then response, L tokens.

    `ids` int32 [L]; `loss_mask` bool [L]; `logprobs` float32 [L], behaviour, 0 on the prompt; `versions`, `epochs`
    int32 [L], what made the token, -1 on the prompt; `staleness` int32 [L], 0 on the prompt. `sample` indexes the
    batch's flat samples. `sample_loss_tokens` counts the loss tokens of all segments of the sample. `temperature` is
    what the response was sampled with. `arrays` are the segment's named arrays, as they were put: per token or per
    sample, large ones as references that `rollq.buffer.wire.arrays.load_array` reads.
    """

    ids: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    epochs: Int32Array
    staleness: Int32Array
    sample: int
    sample_loss_tokens: int
    temperature: float
    arrays: NamedArrays


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What the loss is normalised by: counts over all ranks. Only completed samples count."""

    loss_tokens: int
    samples: int
    groups: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of train step `step`, with this rank's share of their sequences.

    Flat samples (S of them) are those of all groups in order, failed ones included: `rewards` float32 [S] (0 where
    failed), `valid` bool [S], `sample_groups` int64 [S] index into `groups`, `advantages` float32 [S]. `sequences` are
    the segments of the valid samples, of all ranks.
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

    @classmethod
    def build(
        cls,
        step: int,
        groups: Sequence[Group],
        *,
        floors: Mapping[str, Mapping[int, int]] | None = None,
        token_thresholds: Mapping[str, int] | None = None,
        settings: AdvantageSettings | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> "Batch":
        """Build the batch of `step`. `floors`: task -> dead epoch -> version that its tokens count as, at most.

        `token_thresholds`: task -> staleness from which on a token is masked out of the loss.
        """
        settings, thresholds = settings or AdvantageSettings(), token_thresholds or {}
        flat = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
        valid = np.array([_is_valid(sample) for _, sample in flat], dtype=np.bool_)
        given = [reward for group in groups for reward in _rewards(group)]
        rewards = np.array([r if ok else 0.0 for r, ok in zip(given, valid, strict=True)], dtype=np.float32)
        sample_groups = np.array([index for index, _ in flat], dtype=np.int64)
        sequences = tuple(
            sequence
            for index, (owner, sample) in enumerate(flat)
            if valid[index]
            for sequence in _sequences(
                sample, index, step, (floors or {}).get(groups[owner].task, {}), thresholds.get(groups[owner].task)
            )
        )
        return cls(
            step=step,
            groups=tuple(groups),
            sequences=sequences,
            rewards=rewards,
            valid=valid,
            sample_groups=sample_groups,
            advantages=_with_given(advantages(rewards, sample_groups, valid, settings), groups, valid),
            counts=BatchCounts(
                loss_tokens=sum(int(sequence.loss_mask.sum()) for sequence in sequences),
                samples=int(valid.sum()),
                groups=len(np.unique(sample_groups[valid])),
            ),
            advantage_settings=settings,
            rank=rank,
            world_size=world_size,
        )

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The flat samples, S of them."""
        return tuple(sample for group in self.groups for sample in group.samples)

    @property
    def share(self) -> tuple[int, ...]:
        """Indices into `sequences` of this rank's part; parts are balanced by tokens."""
        return tuple(packing.balance([len(s.ids) for s in self.sequences], self.world_size)[self.rank])

    def with_rewards(self, rewards: npt.ArrayLike) -> "Batch":
        """The same batch with other `rewards` [S] and the advantages that follow from them."""
        changed = np.asarray(rewards, dtype=np.float32)
        return replace(
            self,
            rewards=changed,
            advantages=advantages(changed, self.sample_groups, self.valid, self.advantage_settings),
        )

    def micro_batches(self, max_tokens: int, *, padded: bool = False, arrays: Sequence[str] = ()) -> "list[MicroBatch]":
        """This rank's share in micro-batches of at most `max_tokens` tokens, the same number on every rank.

        Packed, all sequences of a micro-batch stand in one row; with `padded`, each has its own row, and rows times
        the longest is at most `max_tokens`. `arrays` names the named arrays that hold a value per token, see
        `MicroBatch.arrays`; references among them are loaded. A rank without sequences left gets micro-batches of one
        token that is masked.

        Raises `ConfigError` for a sequence longer than `max_tokens`, `InvalidGroup` for a missing or misshapen array,
        `ArrayError` for a reference whose file is missing or was changed.
        """
        from rollq.consumer.micro_batch import assemble

        plan = packing.plan([len(s.ids) for s in self.sequences], self.world_size, max_tokens, padded=padded)
        return [assemble(self, chosen, padded=padded, arrays=arrays) for chosen in plan[self.rank]]

    def to_torch(self, *, arrays: Sequence[str] = ()) -> "MicroBatch":
        """This rank's whole share as one padded micro-batch, a sequence per row [B, T]."""
        from rollq.consumer.micro_batch import assemble

        return assemble(self, self.share, padded=True, arrays=arrays)


def _rewards(group: Group) -> Sequence[float | None]:
    """The rewards of a group's samples: those that a pipeline gave them, else the judge's."""
    return group.shaped.rewards if group.shaped else [sample.reward for sample in group.samples]


def _with_given(computed: Float32Array, groups: Sequence[Group], valid: BoolArray) -> Float32Array:
    """The advantages, those replaced that a pipeline gave; [S]."""
    chosen = computed.copy()
    at = 0
    for group in groups:
        end = at + len(group.samples)
        if group.shaped and group.shaped.advantages is not None:
            chosen[at:end] = np.where(valid[at:end], group.shaped.advantages, 0.0)
        at = end
    return chosen


def _is_valid(sample: Sample) -> bool:
    return sample.status is SampleStatus.COMPLETED and sample.reward is not None


def _sequences(
    sample: Sample, index: int, step: int, floors: Mapping[int, int], token_threshold: int | None
) -> list[TokenSequence]:
    """The segments of a sample that have tokens; each knows how many loss tokens the whole sample has."""
    segments = [segment for segment in sample.segments if len(segment.prompt_ids) + len(segment.response_ids)]
    oldest_staleness = None if brings_labels(sample) else token_threshold
    masks = [_loss_mask(segment, step, floors, oldest_staleness) for segment in segments]
    loss_tokens = sum(int(mask.sum()) for mask in masks)
    # 0 means greedy: engines then report logprobs of the untempered distribution
    temperature = float(sample.sampling.get("temperature", 1.0)) or 1.0
    return [
        _sequence(segment, mask, index, loss_tokens, temperature, step, floors)
        for segment, mask in zip(segments, masks, strict=True)
    ]


def _sequence(
    segment: Segment,
    mask: BoolArray,
    index: int,
    loss_tokens: int,
    temperature: float,
    step: int,
    floors: Mapping[int, int],
) -> TokenSequence:
    prompt = len(segment.prompt_ids)
    spans = segment.versions
    return TokenSequence(
        ids=np.concatenate([segment.prompt_ids, segment.response_ids]).astype(np.int32),
        loss_mask=mask,
        logprobs=np.concatenate([np.zeros(prompt, np.float32), segment.logprobs]).astype(np.float32),
        versions=_per_token(prompt, -1, spans, [span.version for span in spans]),
        epochs=_per_token(prompt, -1, spans, [span.epoch for span in spans]),
        staleness=_per_token(prompt, 0, spans, [step - _counted(span, floors) - 1 for span in spans]),
        sample=index,
        sample_loss_tokens=loss_tokens,
        temperature=temperature,
        arrays=segment.arrays,
    )


def _loss_mask(segment: Segment, step: int, floors: Mapping[int, int], token_threshold: int | None) -> BoolArray:
    """Bool [L]: where the loss counts, prompt included: what the model wrote, unless it is too old."""
    response = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    if token_threshold is not None:
        versions = _per_token(0, 0, segment.versions, [_counted(span, floors) for span in segment.versions])
        response = response & token_mask(step, versions, token_threshold)
    mask = np.concatenate([np.zeros(len(segment.prompt_ids), np.bool_), response])
    mask[:1] = False  # nothing predicts the first token of a sequence
    return mask


def _counted(span: VersionSpan, floors: Mapping[int, int]) -> int:
    """The version that a span counts as: after a rewind, versions of a dead epoch mean at most its floor."""
    return min(span.version, floors.get(span.epoch, span.version))


def _per_token(prompt: int, fill: int, spans: Sequence[VersionSpan], values: Sequence[int]) -> Int32Array:
    """`fill` over the prompt, then each span's value over its tokens, int32 [L]."""
    lengths = [prompt, *(span.tokens for span in spans)]
    return np.repeat(np.array([fill, *values], dtype=np.int32), lengths)
