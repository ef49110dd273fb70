"""A teacher's logprobs for a micro-batch, from its samples' named arrays. Needs torch."""

from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import Float32Array
from rollq.buffer.wire.arrays import load_array
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.batches.sequences import TokenSequence

TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""Name of the array in `Segment.arrays`; a pool `teacher` among the task's `scorers` writes it."""
TEACHER_TOP_IDS: Final = "teacher_top_ids"
TEACHER_TOP_LOGPROBS: Final = "teacher_top_logprobs"
"""Names of the arrays that the pool also writes if it has `top_k`."""
ABSENT: Final = -1e9
"""The logprob that fills positions with fewer tokens than others."""


class TopLogprobs(NamedTuple):
    """The teacher's likeliest k tokens at each loss token: `ids` int64 [n, k], `logprobs` float32 [n, k] in nats.

    If a position has fewer, the rest are token 0 with the logprob `ABSENT`.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


def teacher_logprobs(batch: Batch, micro: MicroBatch, tasks: Collection[str]) -> torch.Tensor:
    """The teacher's logprobs of the loss tokens of `tasks` in a micro-batch of `batch`, 0 for tokens of other tasks.

    float32 [n] in nats, ordered as in `token_logprobs`, on the micro-batch's device. Raises `InvalidGroup`, naming the
    task, for a sample without the array or with a misshapen one, `ArrayError` for a reference that cannot be loaded.
    """
    logprobs = [np.zeros(0, np.float32)]
    for sequence in _trained(batch, micro):
        if task_of(sequence.task) in tasks and sequence.loss_mask.any():
            logprobs.append(_of(sequence)[sequence.loss_mask])
        else:
            logprobs.append(np.zeros(int(sequence.loss_mask.sum()), np.float32))
    return torch.from_numpy(np.concatenate(logprobs)).to(micro.loss_mask.device)


def teacher_top_logprobs(
    batch: Batch, micro: MicroBatch, tasks: Collection[str], *, vocabulary: int | None = None
) -> TopLogprobs:
    """The teacher's likeliest tokens at the loss tokens of `tasks` in a micro-batch of `batch`; other tokens have none.

    Raises the exceptions of `teacher_logprobs`, and `InvalidGroup` for tokens outside a `vocabulary` of this size. k is
    the largest in the micro-batch.
    """
    by_sequence = []
    for sequence in _trained(batch, micro):
        tokens = int(sequence.loss_mask.sum())
        if task_of(sequence.task) in tasks and tokens:
            by_sequence.append(_top_of(sequence, vocabulary))
        else:
            by_sequence.append((np.zeros((tokens, 0), np.int64), np.zeros((tokens, 0), np.float32)))
    most = max((ids.shape[1] for ids, _ in by_sequence), default=0)
    total = sum(len(ids) for ids, _ in by_sequence)
    top = TopLogprobs(torch.zeros(total, most, dtype=torch.int64), torch.full((total, most), ABSENT))
    row = 0
    for ids, logprobs in by_sequence:
        rows, columns = ids.shape
        top.ids[row : row + rows, :columns] = torch.from_numpy(ids)
        top.logprobs[row : row + rows, :columns] = torch.from_numpy(logprobs)
        row += rows
    return TopLogprobs(*(tensor.to(micro.loss_mask.device) for tensor in top))


def _trained(batch: Batch, micro: MicroBatch) -> Iterator[TokenSequence]:
    """The sequences of a micro-batch that have loss tokens."""
    trained = set(micro.sequence_index[micro.loss_mask].tolist())
    return (batch.sequences[index] for index in micro.sequences if index in trained)


def _of(sequence: TokenSequence) -> Float32Array:
    """The teacher's logprobs of all tokens, float32 [L], 0 on the prompt."""
    logprobs = np.asarray(_array(sequence, TEACHER_LOGPROBS), np.float32)
    response = len(sequence.ids) - sequence.prompt_tokens
    if logprobs.shape != (response,) or not np.isfinite(logprobs).all():
        raise InvalidGroup(
            f"{_name(sequence)} has an array {TEACHER_LOGPROBS!r} of shape {list(logprobs.shape)}; expected finite "
            f"numbers of shape [{response}], one for each response token"
        )
    return np.concatenate([np.zeros(sequence.prompt_tokens, np.float32), logprobs])


def _top_of(sequence: TokenSequence, vocabulary: int | None) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """The teacher's likeliest tokens at the loss tokens, [n, k], and their logprobs."""
    ids = np.asarray(_array(sequence, TEACHER_TOP_IDS, _TOP_K))
    logprobs = np.asarray(_array(sequence, TEACHER_TOP_LOGPROBS, _TOP_K), np.float32)
    response = len(sequence.ids) - sequence.prompt_tokens
    are_tokens = np.issubdtype(ids.dtype, np.integer) and ids.min(initial=0) >= 0
    if ids.shape != logprobs.shape or ids.shape[:-1] != (response,) or not are_tokens:
        raise InvalidGroup(
            f"{_name(sequence)} has arrays {TEACHER_TOP_IDS!r} and {TEACHER_TOP_LOGPROBS!r} of shapes "
            f"{list(ids.shape)} and {list(logprobs.shape)}; expected ids and logprobs of shape [{response}, k], a row "
            "for each response token"
        )
    if not np.isfinite(logprobs).all():
        raise InvalidGroup(f"{_name(sequence)} has logprobs in {TEACHER_TOP_LOGPROBS!r} that are not finite")
    if vocabulary is not None and ids.max(initial=0) >= vocabulary:
        raise InvalidGroup(
            f"{_name(sequence)} has token {ids.max()} of the teacher in {TEACHER_TOP_IDS!r}, but the model has "
            f"{vocabulary} tokens: both need the same tokenizer"
        )
    is_counted = sequence.loss_mask[sequence.prompt_tokens :]
    return ids.astype(np.int64)[is_counted], logprobs[is_counted]


_TOP_K = ', with top_k set to the number of tokens that the loss uses: distilled_tokens = "top_k" needs it'


def _array(sequence: TokenSequence, name: str, more: str = "") -> npt.NDArray[Any]:
    array = sequence.arrays.get(name)
    if array is None:
        raise InvalidGroup(
            f"{_name(sequence)} has no array {name!r}, which distillation in [trainer.loss] needs: name a pool "
            f'"teacher" in scorers of the task, and configure it as [worker.pools.teacher]{more}'
        )
    return load_array(array)


def _name(sequence: TokenSequence) -> str:
    return f"group {sequence.group_id} of task {sequence.task!r}"
