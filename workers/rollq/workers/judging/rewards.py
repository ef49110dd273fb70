"""Values that a judge may return, and the verdict made from them. Pure.

returned                               reward                          kept with the sample
a number                               itself
numbers by name                        their sum                       `reward_parts`
a mapping with the name `score`        `score`                         numbers and booleans in `reward_parts`, where
                                                                       they do not count, and the rest in `extra`
`Credit`                               its reward, else the sum        rewards of tokens

Only real numbers are rewards, never strings or booleans, even `"1.0"` or `True`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from rollq.buffer.rewards.credit import StepKind, last_tokens
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Float32Array, Sample
from rollq.workers.user_code.real_numbers import finite, is_real

Reward = float | Mapping[str, Any]

SCORE: Final = "score"
"""The reward's name in a mapping whose other entries are facts, as in verl's reward functions."""

JUDGE_ERROR: Final = "judge_error"
"""The name of the fact that a sample's reward is 0 because its judge failed."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A judge's answer with rewards for a sample's single tokens or turns.

    `tokens` has one number for each response token of all segments, segment by segment. Alternatively, `turns` has one
    number for each of the model's turns, for the turn's last token. `reward` is a number, or named parts, for functions
    of whole samples, such as filters and metrics; None means the sum of `tokens` or `turns`.
    """

    reward: Reward | None = None
    tokens: Iterable[float] | None = None
    turns: Iterable[float] | None = None


Answer = Reward | Credit


class InvalidReward(ValueError):
    """A judge returned something that is not a reward."""


class Verdict(NamedTuple):
    """A judge's result for one sample: a reward with its named parts, or the error that prevented one.

    `parts` add up to the reward. `facts` holds further numbers, which do not count. `notes` holds other facts, as JSON.
    `token_rewards` float32 [R] holds the rewards of all segments' response tokens, None if the judge gave none.
    `raised` is true if the judge raised or took too long for this sample, and false for `SampleFailed`, whose kind is
    the `failure`. `cause` is the exception behind the error, for the log.
    """

    reward: float | None = None
    parts: Mapping[str, float] = MappingProxyType({})
    error: str | None = None
    token_rewards: Float32Array | None = None
    facts: Mapping[str, float] = MappingProxyType({})
    notes: Mapping[str, Any] = MappingProxyType({})
    raised: bool = False
    cause: Exception | None = None
    failure: FailureKind = FailureKind.GRADER


def failed_as_wrong(verdict: Verdict) -> Verdict:
    """A reward of 0, which keeps the error, for a sample whose judge failed."""
    return Verdict(0.0, facts={JUDGE_ERROR: 1.0}, notes={JUDGE_ERROR: verdict.error})


def check_reward(answer: Any) -> Verdict:
    """Make the verdict for a reward. Raises `ValueError` unless the reward and its parts are finite numbers."""
    if not isinstance(answer, Mapping):
        return Verdict(finite(answer, "a number, or a mapping of names to numbers"))
    if SCORE in answer:
        return _with_facts(answer)
    parts = {str(name): _part(answer, name) for name in answer}
    if not parts:
        raise ValueError("returned a mapping without entries; expected a number, or a mapping of names to numbers")
    return Verdict(finite(sum(parts.values())), parts)


def _part(answer: Mapping[Any, Any], name: Any) -> float:
    try:
        return finite(answer[name])
    except ValueError:
        raise ValueError(
            f"returned {dict(answer)!r:.200}, whose entry {name!r} is not a finite number of 32 bits; return numbers "
            f"that add up to the reward, or {{{SCORE!r}: the reward}} beside other facts"
        ) from None


def _with_facts(answer: Mapping[Any, Any]) -> Verdict:
    score = _part(answer, SCORE)
    facts: dict[str, float] = {}
    notes: dict[str, Any] = {}
    for name, value in answer.items():
        if name == SCORE:
            continue
        if isinstance(value, bool | np.bool_):
            facts[str(name)] = float(value)
        elif is_real(value):
            facts[str(name)] = _part(answer, name)
        else:
            notes[str(name)] = _as_json(name, value)
    return Verdict(score, {SCORE: score}, facts=facts, notes=notes)


def _as_json(name: Any, value: Any) -> Any:
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError as error:
        raise ValueError(f"returned {name!r}: {value!r:.80}, which is not JSON: {error}") from None


def plain_verdict(verdict: Verdict) -> Reward:
    """For a verdict without token rewards, a value in JSON that a judge could have returned."""
    if verdict.facts or verdict.notes:
        return {**verdict.parts, **verdict.facts, **verdict.notes}
    return dict(verdict.parts) or float(verdict.reward or 0.0)


def check_answer(answer: Any, sample: Sample) -> Verdict:
    """Make the verdict for a judge's answer. Raises `ValueError` unless the answer's numbers are finite, with one for
    each of the sample's tokens or turns."""
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
    rewards[places] = values
    return check_reward(sum(values) if given["reward"] is None else given["reward"])._replace(token_rewards=rewards)


def plain_credit(credit: Credit) -> dict[str, Any]:
    """A credit's fields as plain numbers, for JSON. Raises `ValueError` unless the numbers are finite, and exactly one
    of `tokens` and `turns` is set."""
    if (credit.tokens is None) is (credit.turns is None):
        given = "without tokens and turns" if credit.tokens is None else "with both tokens and turns"
        raise ValueError(f"returned Credit {given}; expected one of the two")
    verdict = Verdict() if credit.reward is None else check_reward(credit.reward)
    return {
        "reward": None if verdict.reward is None else plain_verdict(verdict),
        "tokens": None if credit.tokens is None else list(map(finite, credit.tokens)),
        "turns": None if credit.turns is None else list(map(finite, credit.turns)),
    }
