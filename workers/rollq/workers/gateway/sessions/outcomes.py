"""A session's outcome, as its program reports it: a reward, a case for the judge, or a failure. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.wire.validation import MOST_REWARD
from rollq.workers.gateway.calls import CallRefused
from rollq.workers.user_code.errors import shown

MOST_EXTRA_BYTES: Final = 16_000
LEVELS_AROUND: Final = 16
"""How many JSON levels a sample's frame may add around an `extra`."""
KINDS: Final = tuple(kind.value for kind in FailureKind)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a session. If `reward` is None, the task's judge decides. `turns` has a reward for each call, and
    `extra` has facts about the episode. `truncated` is true if a limit ended the episode, and `failure` is the reason
    why the sample fails.
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    failure: tuple[FailureKind, str] | None = None


def rewarded(body: Mapping[str, Any]) -> Outcome:
    """The outcome that a program sends as a reward. Raises `CallRefused`."""
    turns, extra = _turns(body.get("turns")), _extra(body.get("extra", {}))
    reward, parts = body.get("reward", "" if turns is None else math.fsum(turns)), body.get("parts", {})
    is_reward = _is_number(reward) or (reward is None and not parts and turns is None)
    if not is_reward or not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise CallRefused(
            'a reward is {"reward": a number, "parts": {name: a number}} with finite numbers, or {"reward": null} if '
            "the task's judge gives it"
        )
    truncated = body.get("truncated", False)
    if not isinstance(truncated, bool):
        raise CallRefused("truncated must be true or false")
    given = None if reward is None else float(reward)
    return Outcome(given, {str(name): float(value) for name, value in parts.items()}, turns, extra, truncated)


def failed_outcome(body: Mapping[str, Any]) -> Outcome:
    """The outcome that a program sends as a failure. Raises `CallRefused`."""
    kind, reason = body.get("kind"), body.get("reason")
    if kind not in KINDS or not isinstance(reason, str) or not reason.strip():
        raise CallRefused(f'a failure is {{"kind": one of {", ".join(KINDS)}, "reason": a text}}')
    return Outcome(failure=(FailureKind(kind), shown(reason.strip())))


def rewards_of_calls(turns: Sequence[float], numbers: Collection[int]) -> Mapping[int, float]:
    """Call number -> reward, from `turns` in the calls' order. Raises `CallRefused` unless each call has one reward."""
    if len(turns) != len(numbers):
        raise CallRefused(f"turns has {len(turns)} numbers for {len(numbers)} answered calls")
    return dict(zip(sorted(numbers), turns, strict=True))


def _turns(given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(map(_is_number, given)):
        raise CallRefused("turns must be a list of finite numbers, one for each call")
    return tuple(map(float, given))


def _extra(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise CallRefused("extra must be an object")
    nested: Any = given
    for _ in range(LEVELS_AROUND):
        nested = [nested]
    try:
        size = len(exact_json.dumps(nested))
    except TypeError:
        raise CallRefused("extra is nested too deeply") from None
    if size > MOST_EXTRA_BYTES:
        raise CallRefused(f"extra has {size} bytes as JSON, more than {MOST_EXTRA_BYTES}")
    return given


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_REWARD
