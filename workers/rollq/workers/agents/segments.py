"""Joins, cuts and checks the segments of responses that arrive in parts. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.rollouts import FinishReason, Int32Array, NamedArrays, Segment, VersionSpan
from rollq.buffer.wire.parts import join_spans
from rollq.workers.agents.stop_strings import cut_at_stop_string
from rollq.workers.engines.protocol import Completion, Request, Tokenizer, parse_reason


def spent(prefix: Int32Array | None, max_tokens: int, end_ids: frozenset[int]) -> FinishReason | None:
    """The finish reason of an existing response; None if more tokens can follow. `end_ids` end a response."""
    if prefix is None or len(prefix) == 0:
        return None
    if int(prefix[-1]) in end_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(prefix) >= max_tokens else None


def rest_of(request: Request, before: Segment | None) -> Request:
    """The request for the tokens still missing after `before`, up to the limit of `request`."""
    if before is None:
        return request
    left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(before.response_ids))
    return replace(request, sampling=left, prefix_ids=before.response_ids)


def continued(
    prompt_ids: Int32Array, before: Segment | None, new: Completion, stop: Sequence[str], tokenizer: Tokenizer
) -> tuple[Segment, FinishReason]:
    """Return `join`'s segment, with `new` cut at a stop string that began in `before`, and the finish reason."""
    if before is not None:
        new = cut_at_stop_string(before.response_ids, new, stop, tokenizer)
    return join(prompt_ids, before, new), parse_reason(new.finish_reason)


def join(prompt_ids: Int32Array, before: Segment | None, new: Completion) -> Segment:
    """The segment `before` with the tokens of `new` appended; a new segment if `before` is None.

    Named per-token arrays are joined too; per-sample arrays stay unchanged. Raises `ValueError` when the engine's
    logprobs, versions or arrays do not cover its tokens.
    """
    check_covered(new, len(prompt_ids) + (0 if before is None else len(before.response_ids)))
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


def first_tokens(segment: Segment, tokens: int) -> Segment:
    """The segment with only its first `tokens` response tokens, which are not copied."""
    response = len(segment.response_ids)
    left, versions = tokens, list[VersionSpan]()
    for epoch, version, spanned in segment.versions:
        if left > 0:
            versions.append(VersionSpan(epoch, version, min(spanned, left)))
            left -= spanned
    return replace(
        segment,
        response_ids=segment.response_ids[:tokens],
        logprobs=segment.logprobs[:tokens],
        versions=tuple(versions),
        loss_mask=None if segment.loss_mask is None else segment.loss_mask[:tokens],
        arrays={
            name: array[: len(array) - response + tokens] if _is_per_token(array, segment) else array
            for name, array in segment.arrays.items()
        },
    )


def check_covered(new: Completion, context: int) -> None:
    """Raise `ValueError` if a new token lacks a logprob, a version, or an entry in an array.

    An array may also cover the `context` tokens before the new tokens.
    """
    covered = sum(span.tokens for span in new.versions)
    if len(new.logprobs) != len(new.ids) or covered != len(new.ids):
        raise ValueError(
            f"the engine gave {len(new.ids)} tokens with {len(new.logprobs)} logprobs and versions for {covered}"
        )
    for name, array in new.arrays.items():
        if len(array) not in (len(new.ids), context + len(new.ids)):
            raise ValueError(f"the engine gave {len(new.ids)} tokens with {len(array)} entries of array {name!r}")


def join_arrays(before: Segment, new: Completion) -> NamedArrays:
    """The arrays of `before`, each continued by its namesake in `new`, or by zeros if `new` has none.

    An array in `new` may also cover the tokens of `before`; its entries replace all-zero entries of `before`. Raises
    `ValueError` if the dtype or shape of an array in `new` differs from its namesake's in `before`.
    """
    if len(new.ids) == 0:
        return before.arrays
    continued = {name: _continued(name, array, before, new) for name, array in new.arrays.items()}
    return {**padded_arrays(before, len(new.ids)), **continued}


def padded_arrays(segment: Segment, added: int) -> NamedArrays:
    """The segment's arrays, with `added` zeros appended to each per-token array."""
    return {
        name: np.concatenate([array, np.zeros((added, *array.shape[1:]), array.dtype)])
        if _is_per_token(array, segment)
        else array
        for name, array in segment.arrays.items()
    }


def _is_per_token(array: Any, segment: Segment) -> TypeGuard[npt.NDArray[Any]]:
    response = len(segment.response_ids)
    lengths = (response, len(segment.prompt_ids) + response)
    return isinstance(array, np.ndarray) and array.ndim > 0 and len(array) in lengths


def _continued(name: str, array: npt.NDArray[Any], before: Segment, new: Completion) -> npt.NDArray[Any]:
    tokens, context = len(before.response_ids), len(array) - len(new.ids)
    first = before.arrays.get(name)
    if first is None and context:
        return array
    expected = (context or tokens, *array.shape[1:])
    if not isinstance(first, np.ndarray) or first.dtype != array.dtype or first.shape != expected:
        raise ValueError(
            f"array {name!r} of the engine is {array.dtype} {list(array.shape)}; it cannot continue "
            f"the array of the first {tokens} tokens: {first!r:.80}"
        )
    return np.concatenate([_filled(first, array[:context]), array[context:]])


def _filled(first: npt.NDArray[Any], again: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array `first` [T, ...], with all-zero entries replaced from `again` [T, ...], unless `again` is empty."""
    if len(again) == 0:
        return first
    is_read = first.reshape(len(first), -1).any(axis=1)
    return np.where(is_read.reshape(-1, *[1] * (first.ndim - 1)), first, again)
