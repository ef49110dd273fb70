"""The logprobs of a teacher in a micro-batch, from the named array `teacher_logprobs`. Needs torch."""

from collections.abc import Collection
from typing import Final

import numpy as np
import torch

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.rollouts import Float32Array
from rollq.buffer.shards import task_of
from rollq.buffer.wire.arrays import load_array
from rollq.consumer.batch import Batch
from rollq.consumer.micro_batch import MicroBatch
from rollq.consumer.sequences import TokenSequence

TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""Name of the array in `Segment.arrays`; a pool `teacher` among the task's `scorers` writes it."""


def teacher_logprobs(batch: Batch, micro: MicroBatch, tasks: Collection[str]) -> torch.Tensor:
    """The teacher's logprobs of the loss tokens of `tasks` in a micro-batch of `batch`, 0 for those of other tasks.

    float32 [n] in nats, ordered as in `token_logprobs`, on the micro-batch's device. Raises `InvalidGroup`, naming the
    task, for a sample without the array or with a misshapen one, `ArrayError` for a reference that cannot be loaded.
    """
    found = [np.zeros(0, np.float32)]
    for sequence in (batch.sequences[index] for index in micro.sequences):
        if task_of(sequence.task) in tasks and sequence.loss_mask.any():
            found.append(_of(sequence)[sequence.loss_mask])
        else:
            found.append(np.zeros(int(sequence.loss_mask.sum()), np.float32))
    return torch.from_numpy(np.concatenate(found)).to(micro.loss_mask.device)


def _of(sequence: TokenSequence) -> Float32Array:
    """The teacher's logprobs of all tokens, float32 [L], 0 on the prompt."""
    name = f"group {sequence.group_id} of task {sequence.task!r}"
    array = sequence.arrays.get(TEACHER_LOGPROBS)
    if array is None:
        raise InvalidGroup(
            f"{name} has no array {TEACHER_LOGPROBS!r}, which distillation in [trainer.loss] needs: name a pool "
            '"teacher" in scorers of the task, and configure it as [worker.pools.teacher]'
        )
    logprobs = np.asarray(load_array(array), np.float32)
    response = len(sequence.ids) - sequence.prompt_tokens
    if logprobs.shape != (response,) or not np.isfinite(logprobs).all():
        raise InvalidGroup(
            f"{name} has an array {TEACHER_LOGPROBS!r} of shape {list(logprobs.shape)}; finite numbers of shape "
            f"[{response}] are needed, one for each response token"
        )
    return np.concatenate([np.zeros(sequence.prompt_tokens, np.float32), logprobs])
