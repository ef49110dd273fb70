"""Refuses requests that can never work, and computes the token limit of all others, for every engine."""

from collections.abc import Mapping, Sequence
from typing import Final

from rollq.workers.engines.protocol import ContextFull, Request, Sampling

UNSUPPORTED: Final[Mapping[str, frozenset[str]]] = {
    "sglang": frozenset({"bad_words"}),
    "transformers": frozenset(
        {
            "bad_words",
            "frequency_penalty",
            "guided_json",
            "guided_regex",
            "logit_bias",
            "min_tokens",
            "presence_penalty",
            "repetition_penalty",
        }
    ),
}
"""Engine -> the sampling parameters that it does not support."""


def token_limit(request: Request, context_tokens: int) -> int:
    """The largest number of new tokens for `request` in a context of `context_tokens` tokens.

    Raises `ContextFull`, and `ValueError` for an empty prompt or invalid sampling parameters.
    """
    if len(request.prompt_ids) == 0:
        raise ValueError("prompt_ids is empty: must have at least one token")
    _check_sampling(request.sampling)
    used = len(request.context)
    if used >= context_tokens:
        raise ContextFull(f"prompt and prefix have {used} tokens and leave no room in a context of {context_tokens}")
    return min(request.sampling.max_tokens, context_tokens - used)


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens!r}: must be at least 1")
    if not sampling.temperature > 0:
        raise ValueError(
            f"temperature is {sampling.temperature!r}: it must be above 0 (for greedy decoding use top_k=1)"
        )
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ValueError(f"top_p {sampling.top_p!r} must be in (0, 1], top_k {sampling.top_k!r} at least 0")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p is {sampling.min_p!r}: it must be in [0, 1]")


def check_supported(sampling: Sampling, engine: str) -> None:
    """Raise `ValueError` for a parameter that the built-in `engine` would ignore."""
    if ignored := sorted(sampling.rare().keys() & UNSUPPORTED.get(engine, frozenset())):
        raise ValueError(f"engine {engine!r} does not support {', '.join(ignored)}")


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raise `ValueError` for a token id outside [0, `vocabulary`)."""
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ValueError(f"token ids must be in [0, {vocabulary}), found {min(ids)} to {max(ids)}")
