"""A rank's sequences as torch tensors, packed into one row or padded into many. Needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.wire.arrays import load_array
from rollq.consumer.batch import BatchCounts, TokenSequence

if TYPE_CHECKING:
    from rollq.consumer.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors for one forward and backward pass; B = 1 row when packed, one row per sequence when padded.

    field              dtype    shape   content
    input_ids          int64    [B, T]  0 on padding
    position_ids       int64    [B, T]  from 0 in every sequence; 0 on padding
    attention_mask     int64    [B, T]  1 on tokens; None when packed (position_ids and cu_seqlens tell sequences apart)
    cu_seqlens         int32    [n + 1] where each packed sequence starts, and T; None when padded
    loss_mask          bool     [B, T]  True where the loss counts
    behaviour_logprobs float32  [B, T]  nats, of logits / temperature; 0 where nothing was sampled
    versions           int32    [B, T]  -1 where nothing was sampled
    staleness          int32    [B, T]  0 where nothing was sampled
    advantages         float32  [B, T]  of the token's sample, the same in all its segments
    temperature        float32  [B, T]  of the token's sample; 1 on padding
    sample_loss_tokens float32  [B, T]  loss tokens of the token's sample, over all its segments
    sequence_index     int64    [B, T]  index into `Batch.sequences`; -1 on padding
    arrays             any      [B, T, ...] named arrays per token, 0 where they say nothing

    `sequences` are the indices into `Batch.sequences` in order; `counts` are those of the whole batch over all ranks.
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
    arrays: Mapping[str, torch.Tensor]
    sequences: tuple[int, ...]
    counts: BatchCounts

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        moved: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved, arrays={name: array.to(device) for name, array in self.arrays.items()})


def assemble(batch: "Batch", chosen: Sequence[int], *, padded: bool, arrays: Sequence[str]) -> MicroBatch:
    """The `chosen` sequences of `batch` as tensors; one masked token when none is chosen."""
    sequences = [batch.sequences[index] for index in chosen] or [_BLANK]
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    of_token = np.repeat(np.arange(len(sequences)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])

    def tensor(flat: npt.NDArray[Any], fill: float = 0) -> torch.Tensor:
        """A per-token array [T, ...] in the layout asked for."""
        if not padded:
            return torch.from_numpy(np.ascontiguousarray(flat[None]))
        rows = np.full((len(sequences), lengths.max(), *flat.shape[1:]), fill, dtype=flat.dtype)
        rows[of_token, positions] = flat
        return torch.from_numpy(rows)

    def joined(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(sequence, name) for sequence in sequences])

    def spread(values: Sequence[float], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """One value per sequence, repeated over its tokens."""
        return np.array(values, dtype=dtype)[of_token]

    return MicroBatch(
        input_ids=tensor(joined("ids").astype(np.int64)),
        position_ids=tensor(positions),
        attention_mask=tensor(np.ones(len(positions), np.int64)) if padded else None,
        cu_seqlens=None if padded else torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)),
        loss_mask=tensor(joined("loss_mask")),
        behaviour_logprobs=tensor(joined("logprobs")),
        versions=tensor(joined("versions"), fill=-1),
        staleness=tensor(joined("staleness")),
        advantages=tensor(
            spread([batch.advantages[s.sample] if s is not _BLANK else 0.0 for s in sequences], np.float32)
        ),
        temperature=tensor(spread([s.temperature for s in sequences], np.float32), fill=1),
        sample_loss_tokens=tensor(spread([s.sample_loss_tokens for s in sequences], np.float32)),
        sequence_index=tensor(spread(list(chosen) or [-1], np.int64), fill=-1),
        arrays={
            name: tensor(np.concatenate([_aligned(batch, s, name) for s in sequences])) for name in arrays if chosen
        },
        sequences=tuple(chosen),
        counts=batch.counts,
    )


_BLANK = TokenSequence(
    ids=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
    logprobs=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int32),
    epochs=np.full(1, -1, np.int32),
    staleness=np.zeros(1, np.int32),
    sample=-1,
    sample_loss_tokens=0,
    temperature=1.0,
    arrays={},
)


def _aligned(batch: "Batch", sequence: TokenSequence, name: str) -> npt.NDArray[Any]:
    """A named array with one entry per token of the sequence: it covers the whole sequence, or the response alone."""
    group = batch.groups[batch.sample_groups[sequence.sample]]
    where = f"task {group.task!r}, group {group.group_id}, sample {sequence.sample} of step {batch.step}"
    if name not in sequence.arrays:
        raise InvalidGroup(f"{where} has no array {name!r}; it has {sorted(sequence.arrays)!r}")
    array = load_array(sequence.arrays[name])
    length, response = len(sequence.ids), int((sequence.versions >= 0).sum())
    if array.ndim and len(array) == length:
        return array
    if array.ndim and len(array) == response:
        return np.concatenate([np.zeros((length - response, *array.shape[1:]), array.dtype), array])
    raise InvalidGroup(
        f"array {name!r} of {where} has shape {array.shape!r}: its first dimension must be the {response} response "
        f"tokens or the {length} tokens of prompt and response; read arrays per sample from Batch.sequences instead"
    )
