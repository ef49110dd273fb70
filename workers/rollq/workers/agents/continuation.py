"""Tokens of an interrupted response joined with those that continue it. Pure."""

import numpy as np

from rollq.buffer.rollouts import FinishReason, Int32Array, NamedArrays, Segment
from rollq.buffer.wire.parts import join_spans
from rollq.workers.engines.protocol import Completion


def spent(prefix: Int32Array | None, max_tokens: int, end_ids: frozenset[int]) -> FinishReason | None:
    """How a response that already exists has ended; None if more tokens can follow. `end_ids` end a response."""
    if prefix is None or len(prefix) == 0:
        return None
    if int(prefix[-1]) in end_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(prefix) >= max_tokens else None


def join(prompt_ids: Int32Array, before: Segment | None, new: Completion) -> Segment:
    """The segment `before` with the tokens of `new` appended; a new segment if there is none before.

    Named arrays per token are joined too; arrays per sample stay as they are. Raises `ValueError` when the engine's
    logprobs, versions or arrays do not cover its tokens.
    """
    check_covered(new)
    if before is None or len(before.response_ids) == 0:
        return Segment(prompt_ids, new.ids, new.logprobs, new.versions, arrays=new.arrays)
    loss_mask = before.loss_mask
    if loss_mask is not None:
        loss_mask = np.concatenate([loss_mask, np.ones(len(new.ids), np.bool_)])
    return Segment(
        prompt_ids=before.prompt_ids,
        response_ids=np.concatenate([before.response_ids, new.ids]),
        logprobs=np.concatenate([before.logprobs, new.logprobs]),
        versions=join_spans(before.versions, new.versions),
        loss_mask=loss_mask,
        arrays=join_arrays(before, new),
    )


def check_covered(new: Completion) -> None:
    """Raise `ValueError` unless every new token has a logprob, a version, and an entry in every array."""
    covered = sum(span.tokens for span in new.versions)
    if len(new.logprobs) != len(new.ids) or covered != len(new.ids):
        raise ValueError(
            f"the engine gave {len(new.ids)} tokens with {len(new.logprobs)} logprobs and versions for {covered}"
        )
    for name, array in new.arrays.items():
        if len(array) != len(new.ids):
            raise ValueError(f"the engine gave {len(new.ids)} tokens with {len(array)} entries of array {name!r}")


def join_arrays(before: Segment, new: Completion) -> NamedArrays:
    """The arrays of `before`, with those of `new` appended to their namesakes.

    Raises `ValueError` for an array of `new` that does not cover the tokens of `before` in the same dtype and shape.
    """
    joined = dict(before.arrays)
    if len(new.ids) == 0:
        return joined
    for name, array in new.arrays.items():
        first = before.arrays.get(name)
        if (
            not isinstance(first, np.ndarray)
            or first.dtype != array.dtype
            or first.shape != (len(before.response_ids), *array.shape[1:])
        ):
            raise ValueError(
                f"array {name!r} of the engine is {array.dtype} {list(array.shape)}; it cannot continue "
                f"that of the first {len(before.response_ids)} tokens: {first!r:.80}"
            )
        joined[name] = np.concatenate([first, array])
    return joined
