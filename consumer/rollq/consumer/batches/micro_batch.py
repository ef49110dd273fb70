"""Token sequences as torch tensors, packed into one row or padded into one row each. Needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import Float32Array
from rollq.buffer.wire.arrays import load_array
from rollq.consumer.batches.sequences import BatchCounts, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors for one forward and backward pass; B = 1 row when packed, one row per sequence when padded.

    field              dtype    shape   content
    input_ids          int64    [B, T]  0 on padding
    position_ids       int64    [B, T]  from 0 in every sequence; 0 on padding
    attention_mask     int64    [B, T]  1 on tokens; None when packed (position_ids and cu_seqlens separate sequences)
    cu_seqlens         int32    [n + 1] the start of each packed sequence, then T; None when padded
    loss_mask          bool     [B, T]  True where the loss counts
    behaviour_logprobs float32  [B, T]  nats, of logits / temperature; 0 where nothing was sampled; NaN where
                                        inserted samples have none
    versions           int32    [B, T]  -1 where nothing was sampled, and in inserted samples
    staleness          int32    [B, T]  0 where nothing was sampled
    advantages         float32  [B, T]  of the token: its sample's, unless the batch has some for each token
    temperature        float32  [B, T]  of the token's sample; 1 on padding
    sample_loss_tokens float32  [B, T]  loss tokens of the token's sample, over all its segments
    sequence_index     int64    [B, T]  index into `Batch.sequences`; -1 on padding
    sample_index       int64    [B, T]  index into `Batch.samples`; -1 on padding
    task_index         int64    [B, T]  index into `task_counts`, by order; -1 on padding
    arrays             any      [B, T, ...] named arrays per token, 0 where they have no entry
    inputs             any      any     further inputs of the model, by name: the pixels of images

    `sequences` holds indices into `Batch.sequences`, in order. `task_counts` holds each task's counts for the whole
    batch over all ranks, and `counts` is their total over all tasks. `loss_scale` multiplies the loss, see
    `Batch.loss_scale`. `lacks_images` is true if some sequences have images that `rollq.consumer.ImageInputs` must
    still add.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    loss_mask: torch.Tensor
    behaviour_logprobs: torch.Tensor
    versions: torch.Tensor
    staleness: torch.Tensor
    advantages: torch.Tensor
    temperature: torch.Tensor
    sample_loss_tokens: torch.Tensor
    sequence_index: torch.Tensor
    sample_index: torch.Tensor
    task_index: torch.Tensor
    arrays: Mapping[str, torch.Tensor]
    sequences: tuple[int, ...]
    task_counts: Mapping[str, BatchCounts]
    loss_scale: float = 1.0
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lacks_images: bool = False

    @property
    def counts(self) -> BatchCounts:
        """The counts of the whole batch over all ranks."""
        return sum(self.task_counts.values(), BatchCounts())

    def to(self, device: torch.device | str) -> "MicroBatch":
        """A copy with all tensors on `device`."""
        moved: dict[str, Any] = {}
        for name in (attribute.name for attribute in fields(self)):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        for name in ("arrays", "inputs"):
            moved[name] = {key: tensor.to(device) for key, tensor in getattr(self, name).items()}
        return replace(self, **moved)


def assemble(
    sequences: Sequence[TokenSequence],
    chosen: Sequence[int],
    advantages: Sequence[Float32Array],
    task_counts: Mapping[str, BatchCounts],
    *,
    padded: bool,
    arrays: Sequence[str],
    loss_scale: float,
) -> MicroBatch:
    """Lay out the `sequences` at the `chosen` indices as tensors; without any, a single masked token.

    `advantages` holds each chosen sequence's token advantages, float32 [L]. Raises `InvalidGroup` for a missing or
    misshapen named array, `ArrayError` for a reference that cannot be loaded.
    """
    rows = [sequences[index] for index in chosen] or [_BLANK]
    row_advantages = advantages if chosen else [np.zeros(1, np.float32)]
    task_ids = _task_indices(rows, task_counts) if chosen else [-1]
    layout = _Layout(rows, padded)
    return MicroBatch(
        input_ids=layout.tensor(_joined(rows, "ids").astype(np.int64)),
        position_ids=layout.tensor(layout.positions),
        attention_mask=layout.attention_mask(),
        cu_seqlens=layout.cu_seqlens(),
        loss_mask=layout.tensor(_joined(rows, "loss_mask")),
        behaviour_logprobs=layout.tensor(_joined(rows, "logprobs")),
        versions=layout.tensor(_joined(rows, "versions"), fill=-1),
        staleness=layout.tensor(_joined(rows, "staleness")),
        advantages=layout.tensor(np.concatenate(row_advantages)),
        temperature=layout.spread(_values(rows, "temperature"), np.float32, fill=1),
        sample_loss_tokens=layout.spread(_values(rows, "sample_loss_tokens"), np.float32),
        sequence_index=layout.spread(list(chosen) or [-1], np.int64, fill=-1),
        sample_index=layout.spread(_values(rows, "sample"), np.int64, fill=-1),
        task_index=layout.spread(task_ids, np.int64, fill=-1),
        arrays=_arrays(layout, rows, arrays),
        sequences=tuple(chosen),
        task_counts=task_counts,
        loss_scale=loss_scale,
        lacks_images=any(row.images for row in rows),
    )


class _Layout:
    """The position of each token: in one row or, with `padded`, in one row per sequence."""

    def __init__(self, sequences: Sequence[TokenSequence], padded: bool) -> None:
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        self._lengths = lengths
        self._padded = padded
        self._row_of_token = np.repeat(np.arange(len(lengths)), lengths)
        self.positions = np.concatenate([np.arange(length) for length in lengths])

    def tensor(self, flat: npt.NDArray[Any], fill: float = 0) -> torch.Tensor:
        """A per-token array [T, ...] in this layout."""
        if not self._padded:
            return torch.from_numpy(np.ascontiguousarray(flat[None]))
        rows = np.full((len(self._lengths), self._lengths.max(), *flat.shape[1:]), fill, dtype=flat.dtype)
        rows[self._row_of_token, self.positions] = flat
        return torch.from_numpy(rows)

    def spread(self, values: Sequence[float], dtype: type[np.generic], fill: float = 0) -> torch.Tensor:
        """One value per sequence, repeated over its tokens."""
        return self.tensor(np.array(values, dtype=dtype)[self._row_of_token], fill)

    def attention_mask(self) -> torch.Tensor | None:
        """1 on tokens, 0 on padding; None when packed."""
        return self.tensor(np.ones(len(self.positions), np.int64)) if self._padded else None

    def cu_seqlens(self) -> torch.Tensor | None:
        """The start of each packed sequence, then the number of tokens, int32 [n + 1]; None when padded."""
        if self._padded:
            return None
        return torch.from_numpy(np.concatenate([[0], self._lengths.cumsum()]).astype(np.int32))


_BLANK = TokenSequence(
    ids=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
    logprobs=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int32),
    epochs=np.full(1, -1, np.int32),
    staleness=np.zeros(1, np.int32),
    prompt_tokens=1,
    task="",
    group_id=-1,
    sample=-1,
    sample_loss_tokens=0,
    temperature=1.0,
    arrays={},
    is_masked=True,
)


def _values(rows: Sequence[TokenSequence], name: str) -> list[float]:
    return [getattr(row, name) for row in rows]


def _joined(rows: Sequence[TokenSequence], name: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(row, name) for row in rows])


def _task_indices(rows: Sequence[TokenSequence], tasks: Mapping[str, BatchCounts]) -> list[int]:
    """The index of each row's task in `tasks`."""
    order = list(tasks)
    return [order.index(task_of(row.task)) for row in rows]


def _arrays(layout: "_Layout", rows: Sequence[TokenSequence], names: Sequence[str]) -> dict[str, torch.Tensor]:
    if all(row.is_masked for row in rows):
        return {}
    return {name: layout.tensor(_named_array(rows, name)) for name in names}


def _named_array(rows: Sequence[TokenSequence], name: str) -> npt.NDArray[Any]:
    arrays = [None if row.is_masked else _aligned(row, name) for row in rows]
    present = next(array for array in arrays if array is not None)
    return np.concatenate(
        [
            np.zeros((len(row.ids), *present.shape[1:]), present.dtype) if array is None else array
            for row, array in zip(rows, arrays, strict=True)
        ]
    )


def _aligned(sequence: TokenSequence, name: str) -> npt.NDArray[Any]:
    """A named array with one entry per token of the sequence. An array that covers only the response is padded with
    0."""
    where = f"task {sequence.task!r}, group {sequence.group_id}, sample {sequence.sample} of the batch"
    if name not in sequence.arrays:
        raise InvalidGroup(f"{where} has no array {name!r}; it has {sorted(sequence.arrays)!r}")
    array = load_array(sequence.arrays[name])
    length, response = len(sequence.ids), len(sequence.ids) - sequence.prompt_tokens
    entries = len(array) if array.ndim else -1
    if entries == length:
        return array
    if entries == response:
        return np.concatenate([np.zeros((length - response, *array.shape[1:]), array.dtype), array])
    raise InvalidGroup(
        f"array {name!r} of {where} has shape {array.shape!r}: its first dimension must be the {response} response "
        f"tokens or the {length} tokens of prompt and response; read arrays per sample from Batch.sequences instead"
    )
