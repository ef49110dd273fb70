"""Answers that a judge may give, and the verdict made of them."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Reward = float | Mapping[str, float]


class Verdict(NamedTuple):
    """A judge's result for one sample: a reward with its named parts, or the error that prevented one."""

    reward: float | None = None
    parts: Mapping[str, float] = MappingProxyType({})
    error: str | None = None


def check_reward(answer: Any) -> Verdict:
    """The verdict of a judge's answer. Raises `ValueError` unless it and its parts are finite numbers."""
    if not isinstance(answer, Mapping):
        return Verdict(_finite(answer))
    parts = {str(name): _finite(part) for name, part in answer.items()}
    return Verdict(_finite(sum(parts.values())), parts)


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {value!r:.80}; a number, or a mapping of names to numbers, is needed") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number!r}; a finite number is needed")
    return number
