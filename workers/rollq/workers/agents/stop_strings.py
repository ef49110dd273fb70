"""Finds stop strings that an interruption cut in two. Pure.

Engines search only the tokens that they generate. When they continue a response, they miss a stop string that started
before the interruption.
"""

from collections.abc import Sequence
from dataclasses import replace

from rollq.buffer.values.rollouts import FinishReason, Int32Array, VersionSpan
from rollq.workers.engines.protocol import Completion, Tokenizer

TOKENS_PER_CHARACTER = 4
"""An upper bound: a token is at least one byte, and a UTF-8 character at most four."""


def cut_at_stop_string(
    prefix_ids: Int32Array, new: Completion, stop: Sequence[str], tokenizer: Tokenizer
) -> Completion:
    """Cut `new`, which continues `prefix_ids` int32 [P], after the token that completes a stop string from the prefix.
    Returns `new` unchanged if there is no such token."""
    longest = max(map(len, stop), default=0)
    tail, ids = prefix_ids[-TOKENS_PER_CHARACTER * longest :].tolist(), new.ids.tolist()
    before = len(tokenizer.decode(tail))
    for tokens in range(1, len(ids) + 1):
        text = tokenizer.decode(tail + ids[:tokens])
        if any(0 <= text.find(string, max(before - len(string) + 1, 0)) < before for string in stop):
            return _first(new, tokens)
        if len(text) >= before + longest:
            break
    return new


def first_among(stop: Sequence[str], text: str) -> str | None:
    """The first stop string in a text; None if there is none."""
    return min([string for string in stop if string in text], key=text.find, default=None)


def _first(new: Completion, tokens: int) -> Completion:
    """The first `tokens` tokens of a completion, with finish reason `STOP`."""
    versions, left = [], tokens
    for epoch, version, count in new.versions:
        if left:
            versions.append(VersionSpan(epoch, version, min(count, left)))
            left -= versions[-1].tokens
    return replace(
        new,
        ids=new.ids[:tokens],
        logprobs=new.logprobs[:tokens],
        versions=tuple(versions),
        finish_reason=FinishReason.STOP,
        arrays={name: array[: len(array) - len(new.ids) + tokens] for name, array in new.arrays.items()},
    )
