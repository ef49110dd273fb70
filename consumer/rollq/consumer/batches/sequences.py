"""Samples as token sequences: one per segment, with the loss mask and the staleness of every token.

Alignment, everywhere in this package: entry t of a per-token array belongs to token t of the sequence, so `logprobs[t]`
is the logprob of `ids[t]` given `ids[:t]` (predicted by the model's output at t - 1). `loss_mask` is False on prompts,
on the environment's tokens, and on the first token of a sequence, which has no prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.rules.staleness import Floors, brings_labels, token_mask
from rollq.buffer.values.rollouts import (
    NO_VERSION,
    BoolArray,
    Float32Array,
    Group,
    ImageRef,
    Int32Array,
    NamedArrays,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.values.sample_columns import Samples


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One segment of a sample as the model reads it: prompt, then response, L tokens.

    `ids` int32 [L], the first `prompt_tokens` are the prompt; `loss_mask` bool [L]; `logprobs` float32 [L], in nats
    under the behaviour policy, 0 on the prompt; `versions`, `epochs` int32 [L], the weights that produced the token, -1
    on the prompt; `staleness` int32 [L], in train steps, 0 on the prompt. On an inserted sample's response, versions
    and epochs are -1, staleness is 0, and absent logprobs are NaN.

    `sample` indexes the batch's flat samples; `task` and `group_id` name its group. `sample_loss_tokens` counts the
    loss tokens in all of the sample's segments. `temperature` is the sampling temperature of the response. `arrays`
    holds the segment's named arrays, per token or per sample; large ones are references that
    `rollq.buffer.wire.arrays.load_array` reads. `images` holds the prompt's images, and `image_options` holds the image
    processor's arguments; see `rollq.consumer.batches.image_inputs`. `is_masked` is true if the sample could not be
    read, and only its length is known.
    """

    ids: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    epochs: Int32Array
    staleness: Int32Array
    prompt_tokens: int
    task: str
    group_id: int
    sample: int
    sample_loss_tokens: int
    temperature: float
    arrays: NamedArrays
    images: tuple[ImageRef, ...] = ()
    image_options: Mapping[str, Any] = field(default_factory=dict)
    is_masked: bool = False


Reduction = Literal["sum", "mean"]
"""How the ranks of a trainer combine their gradients."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The denominators of the loss: counts over all ranks. Only completed samples count."""

    loss_tokens: int = 0
    samples: int = 0
    groups: int = 0

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        """The summed counts of two batch parts."""
        return BatchCounts(
            self.loss_tokens + other.loss_tokens, self.samples + other.samples, self.groups + other.groups
        )


@dataclass(frozen=True, slots=True)
class TokenStaleness:
    """How stale the tokens of a group are at train step `step`.

    `floors` sets how tokens of dead epochs count. Tokens with a staleness of `threshold` or more are masked out of the
    loss; None masks nothing.
    """

    step: int
    floors: Floors = field(default_factory=Floors)
    threshold: int | None = None

    def version(self, span: VersionSpan) -> int:
        """The version that a span counts as: after a rewind, versions of a dead epoch count as at most its floor.
        Tokens from outside the run's weights are never stale, and count as on policy."""
        if span.version == NO_VERSION:
            return self.step - 1
        return self.floors.counted(span.epoch, span.version)

    def of_span(self, span: VersionSpan) -> int:
        """The staleness of a span's tokens in train steps; 0 is on policy."""
        return self.step - self.version(span) - 1

    def mask(self, spans: Sequence[VersionSpan]) -> BoolArray:
        """False where a response token is too stale for the loss, bool [response tokens]."""
        tokens = [span.tokens for span in spans]
        if self.threshold is None:
            return np.ones(sum(tokens), np.bool_)
        versions = np.array([self.version(span) for span in spans], np.int64)
        return token_mask(self.step, versions, self.threshold).repeat(tokens)


def token_sequences(
    groups: Sequence[Group], valid: BoolArray, staleness: Sequence[TokenStaleness], starts: Sequence[int]
) -> tuple[TokenSequence, ...]:
    """The sequences of the groups' `valid` samples, bool [S]: one per segment with tokens.

    `staleness` has an item for each group; `starts` holds the number of each group's first sample in the batch. Raises
    `InvalidGroup` for a segment that `check_group` would refuse.
    """
    flat = _Flat()
    begin = 0
    for group, start, ages in zip(groups, starts, staleness, strict=True):
        samples = Samples.of(group.samples)
        flat.add(group, samples, start, valid[begin : begin + len(samples)], ages)
        begin += len(samples)
    return flat.sequences()


class _Flat:
    """The concatenated arrays of all sequences, and the fields per sequence."""

    def __init__(self) -> None:
        self._facts: list[dict[str, Any]] = []
        self._ids: list[Int32Array] = [np.zeros(0, np.int32)]
        self._lengths: list[int] = []  # of prompt, response, prompt, ...
        self._logprobs: list[Float32Array] = [np.zeros(0, np.float32)]
        self._masks: list[BoolArray] = [np.zeros(0, np.bool_)]
        self._spans: list[tuple[int, int, int, int]] = []  # tokens, version, epoch, staleness; a prompt is a span

    def add(self, group: Group, samples: Samples, first: int, valid: BoolArray, staleness: TokenStaleness) -> None:
        """Add a group's samples. Its first sample is number `first` in the batch."""
        for index, segments in enumerate(samples.segments):
            if not valid[index]:
                continue
            masks_by = None if brings_labels(segments) else staleness
            for segment in segments:
                prompt, tokens, spans = segment.prompt_ids, len(segment.response_ids), segment.versions
                if len(prompt) + tokens == 0:
                    continue
                self._ids += (prompt, segment.response_ids)
                self._lengths += (len(prompt), tokens)
                self._logprobs.append(segment.logprobs)
                self._masks.append(_mask(segment, masks_by))
                self._spans.append((len(prompt), -1, -1, 0))
                self._spans += [(span.tokens, span.version, span.epoch, staleness.of_span(span)) for span in spans]
                self._facts.append(
                    {
                        "prompt_tokens": len(prompt),
                        "task": group.task,
                        "group_id": group.group_id,
                        "sample": first + index,
                        # 0 means greedy: engines then report logprobs of the untempered distribution
                        "temperature": samples.temperatures[index] or 1.0,
                        "arrays": segment.arrays,
                        "images": group.prompt.images,
                        "image_options": group.prompt.image_options,
                        "is_masked": samples.statuses[index] is SampleStatus.FAILED,
                    }
                )

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The added sequences, as views of the arrays."""
        lengths = np.array(self._lengths, np.int64).reshape(-1, 2)
        ends = lengths.sum(axis=1).cumsum()
        starts = ends - lengths.sum(axis=1)
        is_response = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
        logprobs = np.zeros(len(is_response), np.float32)
        logprobs[is_response] = np.concatenate(self._logprobs)
        loss_mask = is_response.copy()
        loss_mask[is_response] = np.concatenate(self._masks)
        loss_mask[starts] = False  # the first token of a sequence has no prediction
        spans = np.array(self._spans, np.int64).reshape(-1, 4)
        per_token = np.repeat(spans[:, 1:].astype(np.int32), spans[:, 0], axis=0).T.copy()
        flat = {
            "ids": np.concatenate(self._ids).astype(np.int32, copy=False),
            "loss_mask": loss_mask,
            "logprobs": logprobs,
            **dict(zip(("versions", "epochs", "staleness"), per_token, strict=True)),
        }
        if {len(array) for array in flat.values()} != {len(is_response)}:
            raise InvalidGroup("arrays or version spans of a segment disagree in length: check_group says where")
        owners = np.array([facts["sample"] for facts in self._facts], np.int64)
        counted = [int(loss_mask[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
        loss_tokens = np.bincount(owners, weights=counted)
        return tuple(
            TokenSequence(
                **{name: array[start:end] for name, array in flat.items()},
                **facts,
                sample_loss_tokens=int(loss_tokens[facts["sample"]]),
            )
            for start, end, facts in zip(starts, ends, self._facts, strict=True)
        )


def _mask(segment: Segment, staleness: TokenStaleness | None) -> BoolArray:
    """True where the loss counts, bool [R]: on the model's tokens, unless `staleness` masks them."""
    mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    return mask if staleness is None else mask & staleness.mask(segment.versions)
