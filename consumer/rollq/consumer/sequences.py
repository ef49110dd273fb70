"""Samples as token sequences: one per segment, with the loss mask and the staleness of every token.

Alignment, everywhere in this package: entry t of a per-token array belongs to token t of the sequence, so
`logprobs[t]` is the logprob of `ids[t]` given `ids[:t]` (predicted by the model's output at t - 1). `loss_mask` is
False on prompts, on tokens that the environment wrote, and on the first token of a sequence, which nothing predicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollq.buffer.rollouts import (
    BoolArray,
    Float32Array,
    Group,
    ImageRef,
    Int32Array,
    NamedArrays,
    Sample,
    Segment,
    VersionSpan,
)
from rollq.buffer.staleness import Floors, brings_labels, token_mask


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One segment of a sample as the model reads it: prompt, then response, L tokens.

    `ids` int32 [L]; `loss_mask` bool [L]; `logprobs` float32 [L], in nats under the behaviour policy, 0 on the prompt;
    `versions`, `epochs` int32 [L], the weights that produced the token, -1 on the prompt; `staleness` int32 [L], in
    train steps, 0 on the prompt. `sample` indexes the batch's flat samples; `task` and `group_id` name its group.
    `sample_loss_tokens` counts the loss tokens of all segments of the sample. `temperature` is the sampling temperature
    of the response. `arrays` are the segment's named arrays, per token or per sample; large ones are references that
    `rollq.buffer.wire.arrays.load_array` reads. `images` are those of the prompt, and `image_options` the arguments
    of the image processor; see `rollq.consumer.images`.
    """

    ids: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    epochs: Int32Array
    staleness: Int32Array
    task: str
    group_id: int
    sample: int
    sample_loss_tokens: int
    temperature: float
    arrays: NamedArrays
    images: tuple[ImageRef, ...] = ()
    image_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The denominators of the loss: counts over all ranks. Only completed samples count."""

    loss_tokens: int
    samples: int
    groups: int


@dataclass(frozen=True, slots=True)
class TokenStaleness:
    """How stale the tokens of one task are at train step `step`.

    Tokens of dead epochs count as `floors` says. Tokens with a staleness of `threshold` or more are masked out of the
    loss; None masks none.
    """

    step: int
    floors: Floors = field(default_factory=Floors)
    threshold: int | None = None

    def version(self, span: VersionSpan) -> int:
        """The version that a span counts as: after a rewind, versions of a dead epoch mean at most its floor."""
        return self.floors.counted(span.epoch, span.version)

    def of_span(self, span: VersionSpan) -> int:
        """The staleness of a span's tokens in train steps; 0 is on policy."""
        return self.step - self.version(span) - 1

    def mask(self, spans: Sequence[VersionSpan]) -> BoolArray:
        """False where a response token is too stale for the loss, bool [response tokens]."""
        versions = _per_token(0, 0, spans, [self.version(span) for span in spans])
        if self.threshold is None:
            return np.ones(len(versions), np.bool_)
        return token_mask(self.step, versions, self.threshold)


def token_sequences(group: Group, sample: Sample, index: int, staleness: TokenStaleness) -> list[TokenSequence]:
    """The sequences of a group's `sample`, number `index` of the batch: one per segment that has tokens."""
    segments = [segment for segment in sample.segments if len(segment.prompt_ids) + len(segment.response_ids)]
    sequences = [_sequence(group, sample, segment, index, staleness) for segment in segments]
    loss_tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    return [replace(sequence, sample_loss_tokens=loss_tokens) for sequence in sequences]


def _sequence(group: Group, sample: Sample, segment: Segment, index: int, staleness: TokenStaleness) -> TokenSequence:
    spans, prompt = segment.versions, len(segment.prompt_ids)
    return TokenSequence(
        ids=np.concatenate([segment.prompt_ids, segment.response_ids]).astype(np.int32),
        loss_mask=_loss_mask(segment, None if brings_labels(sample) else staleness),
        logprobs=np.concatenate([np.zeros(prompt, np.float32), segment.logprobs]).astype(np.float32),
        versions=_per_token(prompt, -1, spans, [span.version for span in spans]),
        epochs=_per_token(prompt, -1, spans, [span.epoch for span in spans]),
        staleness=_per_token(prompt, 0, spans, [staleness.of_span(span) for span in spans]),
        task=group.task,
        group_id=group.group_id,
        sample=index,
        sample_loss_tokens=0,
        # 0 means greedy: engines then report logprobs of the untempered distribution
        temperature=float(sample.sampling.get("temperature", 1.0)) or 1.0,
        arrays=segment.arrays,
        images=group.prompt.images,
        image_options=group.prompt.image_options,
    )


def _loss_mask(segment: Segment, staleness: TokenStaleness | None) -> BoolArray:
    """True where the loss counts, bool [L]: on the model's own tokens, unless `staleness` masks them."""
    response = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    if staleness is not None:
        response = response & staleness.mask(segment.versions)
    mask = np.concatenate([np.zeros(len(segment.prompt_ids), np.bool_), response])
    mask[:1] = False  # nothing predicts the first token of a sequence
    return mask


def _per_token(prompt: int, fill: int, spans: Sequence[VersionSpan], values: Sequence[int]) -> Int32Array:
    """`fill` over the prompt, then each span's value over its tokens, int32 [L]."""
    lengths = [prompt, *(span.tokens for span in spans)]
    return np.repeat(np.array([fill, *values], dtype=np.int32), lengths)
