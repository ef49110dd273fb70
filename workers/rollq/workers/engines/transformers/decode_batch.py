"""The running batch of a causal LM: sequences join and leave between decode steps and share one key-value cache.

Invariant: a sequence's logits equal a plain forward pass's over its tokens under the current weights, and do not depend
on the batch's other rows. Rows are padded on the left; the mask hides the padding, and positions do not count it.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache

from rollq.buffer.images.processor import ImageProcessor, PlacedImages
from rollq.buffer.values.rollouts import FinishReason
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.workers.engines.protocol import Completion, Sampling, WeightsVersion
from rollq.workers.engines.transformers.expert_recorder import ExpertArray, ExpertRecorder
from rollq.workers.engines.transformers.sampling import SamplingRows, sample, token_logprobs, uniforms
from rollq.workers.engines.version_spans import version_spans

_MAX_SEED = 2**64 - 1


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A running sequence. `context` holds the prompt's tokens, then the prefix's `prefix_tokens` tokens. `ids` and
    `logprobs` hold generated tokens. `versions` holds pairs (version, index of its first token). `experts` holds
    [layers, top_k] for each token read, from the pass that computed the next token's logprob. `images` holds the
    prompt's images."""

    context: list[int]
    prefix_tokens: int
    sampling: Sampling
    seed: int
    token_limit: int
    versions: list[tuple[WeightsVersion, int]]
    images: PlacedImages | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The tokens generated so far, as a completion."""
        return Completion(
            np.array(self.ids, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            version_spans(self.versions, len(self.ids)),
            finish_reason,
            {ROUTED_EXPERTS: self._routed_experts()} if self.experts else {},
        )

    def read(self, experts: ExpertArray) -> None:
        """Record the `experts` [tokens, layers, top_k] of a pass over all tokens.

        If a token has a successor, it keeps the experts of the pass that generated the successor.
        """
        self.experts[-1:] = experts[max(len(self.experts) - 1, 0) :]

    def _routed_experts(self) -> ExpertArray:
        """All tokens' experts. The last token's experts are unknown until its successor is generated."""
        before_last = len(self.context) + len(self.ids) - 1
        return np.stack([*self.experts[:before_last], np.zeros_like(self.experts[0])])


@dataclass(slots=True, eq=False)
class _State:
    """The model's state for B rows of T columns: the cache, the attention mask int64 [B, T], and the next tokens'
    logits [B, V]."""

    cache: Any  # a DynamicCache whose layers all hold `keys` and `values` [B, heads, T, head size]
    mask: torch.Tensor
    logits: torch.Tensor


class DecodeBatch:
    """Sequences that are decoded together. Not thread-safe: one thread calls its methods."""

    def __init__(
        self,
        model: Any,
        eos_ids: frozenset[int],
        decode: Callable[[list[int]], str],
        recorder: ExpertRecorder | None = None,
        processor: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        """`decode` turns response ids into text, only for sequences with stop strings. `recorder` records the experts
        of `model`; `processor` returns the image processor of `model`."""
        self.sequences: list[ActiveSequence] = []
        self._model = model
        self._eos_ids = eos_ids
        self._decode = decode
        self._recorder = recorder
        self._processor = processor
        self._state: _State | None = None
        self._set_rows()

    @torch.no_grad()
    def add(self, sequences: Sequence[ActiveSequence]) -> None:
        """Read the tokens of `sequences`, and add the sequences to the batch."""
        if not sequences:
            return
        state = self._prefill(sequences)
        self._state = state if self._state is None else merge(self._state, state)
        self.sequences.extend(sequences)
        self._set_rows()

    @torch.no_grad()
    def step(self) -> list[ActiveSequence]:
        """Sample one token for every sequence. Removes and returns the finished sequences."""
        if self._state is None:
            return []
        draws = torch.from_numpy(uniforms(self._seeds, self._positions)).to(self._state.logits.device)
        ids, logprobs = sample(token_logprobs(self._state.logits, self._sampling), draws)
        self._positions += np.uint64(1)
        for sequence, token, logprob in zip(self.sequences, ids.tolist(), logprobs.tolist(), strict=True):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish_reason = self._finish_reason(sequence)
        finished = [sequence for sequence in self.sequences if sequence.finish_reason is not None]
        rows = self.remove(finished)
        if self._state is not None:
            decode(self._model, self._state, ids if rows is None else ids[rows])
            self._record_step()
        return finished

    def remove(self, leaving: Sequence[ActiveSequence]) -> torch.Tensor | None:
        """Remove sequences. Returns the remaining rows' indices int64; None if all or no rows remain."""
        if not leaving:
            return None
        gone = set(map(id, leaving))
        stay = [row for row, sequence in enumerate(self.sequences) if id(sequence) not in gone]
        self.sequences = [self.sequences[row] for row in stay]
        self._set_rows()
        if not stay or self._state is None:
            self._state = None
            return None
        rows = torch.tensor(stay, device=self._state.mask.device)
        self._state = select(self._state, rows)
        return rows

    @torch.no_grad()
    def recompute(self, version: WeightsVersion) -> None:
        """Read all tokens again after the weights have changed to `version`. Later tokens get this version."""
        for sequence in self.sequences:
            sequence.versions.append((version, len(sequence.ids)))
        if self.sequences:
            self._state = self._prefill(self.sequences)

    def _prefill(self, sequences: Sequence[ActiveSequence]) -> _State:
        """Read all tokens of `sequences`. Equal sequences (a group's samples) are read once, and sequences with images
        are read alone."""
        unique: dict[_Row, int] = {}
        index = [unique.setdefault(_Row.of(sequence), len(unique)) for sequence in sequences]
        rows = list(unique)
        passes = _passes(rows)
        state: _State | None = None
        read: dict[int, ExpertArray] = {}
        for numbers in passes:
            prefilled = self._read([rows[number] for number in numbers])
            state = prefilled if state is None else merge(state, prefilled)
            if self._recorder is not None:
                read |= dict(zip(numbers, self._recorder.take(len(numbers)), strict=True))
        for sequence, number in zip(sequences, index, strict=True):
            if read:
                sequence.read(read[number][-len(rows[number].ids) :])
        order = [number for numbers in passes for number in numbers]
        assert state is not None
        return select(state, torch.tensor([order.index(number) for number in index], device=self._model.device))

    def _read(self, rows: Sequence["_Row"]) -> _State:
        ids, images = [row.ids for row in rows], rows[0].images
        if images is None:
            return prefill(self._model, ids)
        assert self._processor is not None
        input_ids = torch.tensor(ids, device=self._model.device)
        return prefill(self._model, ids, self._processor().inputs(input_ids, [images.images]))

    def _record_step(self) -> None:
        """Record the experts of the tokens, one per sequence, that a decode step read."""
        if self._recorder is None:
            return
        experts = self._recorder.take(len(self.sequences))
        for sequence, (row,) in zip(self.sequences, experts, strict=True):
            sequence.experts.append(row)

    def _set_rows(self) -> None:
        """Collect the sampling parameters of each row. Called whenever rows join or leave."""
        self._sampling = SamplingRows.from_rows([sequence.sampling for sequence in self.sequences], self._model.device)
        self._seeds = np.array([sequence.seed & _MAX_SEED for sequence in self.sequences], dtype=np.uint64)
        # Counted within the whole response, so a continued response draws the same tokens as an uninterrupted one.
        self._positions = np.array(
            [sequence.prefix_tokens + len(sequence.ids) for sequence in self.sequences], dtype=np.uint64
        )

    def _finish_reason(self, sequence: ActiveSequence) -> FinishReason | None:
        if sequence.images is not None and sequence.ids[-1] in sequence.images.reserved:
            return FinishReason.ERROR  # the model cannot read the token again: it would expect another image
        if sequence.ids[-1] in sequence.sampling.end_ids(self._eos_ids):
            return FinishReason.STOP
        if sequence.sampling.stop:
            response = sequence.context[len(sequence.context) - sequence.prefix_tokens :] + sequence.ids
            text = self._decode(response)
            if any(string in text for string in sequence.sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.ids) >= sequence.token_limit else None


class _Row(NamedTuple):
    """A sequence's ids and images, as inputs of a forward pass."""

    ids: tuple[int, ...]
    images: PlacedImages | None

    @classmethod
    def of(cls, sequence: ActiveSequence) -> Self:
        return cls(tuple(sequence.context + sequence.ids), sequence.images)


def prefill(model: Any, rows: Sequence[tuple[int, ...]], inputs: Mapping[str, torch.Tensor] | None = None) -> _State:
    """Read whole sequences. `inputs` holds further model inputs, for rows of equal length."""
    width = max(map(len, rows))
    ids = torch.tensor([(0,) * (width - len(row)) + row for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
    cache = DynamicCache()
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
        **{_cache_argument(model.__class__): cache, **(inputs or {})},
    ).logits[:, -1]
    return _State(cache, mask, logits)


def decode(model: Any, state: _State, ids: torch.Tensor) -> None:
    """Append one token to each row: `ids` int64 [B]."""
    state.mask = functional.pad(state.mask, (0, 1), value=1)
    state.logits = model(
        input_ids=ids[:, None],
        attention_mask=state.mask,
        position_ids=state.mask.sum(dim=-1, keepdim=True) - 1,
        use_cache=True,
        **{_cache_argument(model.__class__): state.cache},
    ).logits[:, -1]


@functools.cache
def _cache_argument(model: type) -> str:
    """The name of this model class's cache argument, which transformers 5.24 renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


def select(state: _State, rows: torch.Tensor) -> _State:
    """The rows with indices `rows` int64 [N], without columns that are padding in every row."""
    mask = state.mask[rows]
    padding = int(mask.any(dim=0).int().argmax())
    for layer in state.cache.layers:
        layer.keys = layer.keys[rows, :, padding:]
        layer.values = layer.values[rows, :, padding:]
    return _State(state.cache, mask[:, padding:], state.logits[rows])


def merge(old: _State, new: _State) -> _State:
    """The rows of `old`, then of `new`, padded on the left to the longer length."""
    width = max(old.mask.shape[1], new.mask.shape[1])

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return functional.pad(tensor, (0, 0, width - tensor.shape[-2], 0))

    for layer, added in zip(old.cache.layers, new.cache.layers, strict=True):
        layer.keys = torch.cat([widen(layer.keys), widen(added.keys)])
        layer.values = torch.cat([widen(layer.values), widen(added.values)])
    masks = [functional.pad(state.mask, (width - state.mask.shape[1], 0)) for state in (old, new)]
    return _State(old.cache, torch.cat(masks), torch.cat([old.logits, new.logits]))


def _passes(rows: Sequence[_Row]) -> list[list[int]]:
    """The row numbers for each pass: each row with images is read alone, all others together."""
    texts = [number for number, row in enumerate(rows) if row.images is None]
    return [[number] for number, row in enumerate(rows) if row.images is not None] + [texts] * bool(texts)
