"""Answers that a judge may give, and the verdict made of them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rollq.buffer.credit import StepKind, last_tokens
from rollq.buffer.rollouts import Float32Array, Sample

Reward = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Credit:
    """A judge's answer that says what single tokens, or turns, of the sample earned.

    `tokens`: one number for each response token, those of all segments one after the other; or `turns`: one for each
    turn of the model, which its last token gets. `reward`: a number, or named parts, for what looks at whole samples,
    such as filters and metrics; None: the sum of the others.
    """

    reward: Reward | None = None
    tokens: Iterable[float] | None = None
    turns: Iterable[float] | None = None


Answer = Reward | Credit


class Verdict(NamedTuple):
    """A judge's result for one sample: a reward with its named parts, or the error that prevented one.

    `token_rewards` float32 [R]: rewards of the response tokens of all segments; None if the judge gave none.
    """

    reward: float | None = None
    parts: Mapping[str, float] = MappingProxyType({})
    error: str | None = None
    token_rewards: Float32Array | None = None


def check_reward(answer: Any) -> Verdict:
    """The verdict of a reward. Raises `ValueError` unless it and its parts are finite numbers."""
    if not isinstance(answer, Mapping):
        return Verdict(_finite(answer))
    parts = {str(name): _finite(part) for name, part in answer.items()}
    return Verdict(_finite(sum(parts.values())), parts)


def check_answer(answer: Any, sample: Sample) -> Verdict:
    """The verdict of a judge's answer. Raises `ValueError` unless its numbers are finite, and as many as the sample has
    tokens, or turns."""
    if not isinstance(answer, Credit):
        return check_reward(answer)
    given = plain_credit(answer)
    kind: StepKind = "tokens" if given["turns"] is None else "turns"
    values = given[kind]
    size = sample.response_tokens
    places = np.arange(size) if kind == "tokens" else last_tokens(sample.segments, kind)
    if len(values) != len(places):
        raise ValueError(f"returned Credit with {len(values)} {kind} for a sample of {len(places)} {kind}")
    rewards = np.zeros(size, np.float32)
    with np.errstate(over="ignore"):
        rewards[places] = values
    if not np.isfinite(rewards).all():
        raise ValueError(f"returned Credit with {kind} that a float32 cannot hold")
    return check_reward(sum(values) if given["reward"] is None else given["reward"])._replace(token_rewards=rewards)


def plain_credit(credit: Credit) -> dict[str, Any]:
    """The fields of a credit as plain numbers, for JSON. Raises `ValueError` unless they are finite, and either
    those of tokens or those of turns."""
    if (credit.tokens is None) is (credit.turns is None):
        given = "without tokens and turns" if credit.tokens is None else "with both tokens and turns"
        raise ValueError(f"returned Credit {given}; one of the two is needed")
    verdict = Verdict() if credit.reward is None else check_reward(credit.reward)
    return {
        "reward": dict(verdict.parts) or verdict.reward,
        "tokens": None if credit.tokens is None else [_finite(value, "a number") for value in credit.tokens],
        "turns": None if credit.turns is None else [_finite(value, "a number") for value in credit.turns],
    }


def _finite(value: Any, needed: str = "a number, or a mapping of names to numbers,") -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {value!r:.80}; {needed} is needed") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number!r}; a finite number is needed")
    return number
