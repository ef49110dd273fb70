"""Judges: what a finished sample is worth.

A judge is a function of (prompt, sample), sync or async, that returns a reward: a number, or named parts that add up to
it. Invariant: a judge that raises, takes too long or returns no finite number makes a *failed* sample with the reason
kept, never a reward of 0; and it never holds up the other samples of its worker.
"""

import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rollq.buffer.plugins import load_plugin
from rollq.buffer.schema import Prompt, Sample
from rollq.workers.usercode import UserFunction

log = logging.getLogger(__name__)

Reward = float | Mapping[str, float]
JudgeFunction = Callable[[Prompt, Sample], Reward | Awaitable[Reward]]

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
MAX_TOLD = 100
"""Different failures of one judge that are logged; all are kept with their samples."""


def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 when the text equals the answer, spaces around both left out; else 0."""
    return float(sample.text.strip() == str(prompt.answer).strip())


def last_number(prompt: Prompt, sample: Sample) -> float:
    """1 when the last number of the text equals the last number of the answer (`#### 42` of GSM8K); else 0.

    Raises `ValueError` when the answer holds no number: such a prompt cannot be judged.
    """
    expected = _last_number(str(prompt.answer))
    if expected is None:
        raise ValueError(f"the answer {prompt.answer!r:.80} holds no number")
    return float(_last_number(sample.text) == expected)


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


BUILT_IN: Final[Mapping[str, JudgeFunction]] = {"exact_match": exact_match, "last_number": last_number}


class Verdict(NamedTuple):
    """What a judge made of a sample: a reward with its named parts, or the error that left it without one."""

    reward: float | None = None
    parts: Mapping[str, float] = MappingProxyType({})
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge by its name, with the time it may take for one sample."""

    name: str
    call: UserFunction
    told: set[str] = field(default_factory=set)

    @classmethod
    def named(cls, name: str, timeout_s: float) -> "Judge":
        """A built-in judge, or one's own by dotted path. Raises `ConfigError` when there is none of that name."""
        function = load_plugin("judge", name, BUILT_IN)
        return cls(name, UserFunction.of(function, timeout_s, quick=name in BUILT_IN))

    async def judge(self, prompt: Prompt, sample: Sample) -> Verdict:
        """The reward of a completed sample, or why it has none."""
        try:
            return check_reward(await self.call(prompt, sample))
        except TimeoutError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a judge's failure is its sample's, whatever it is
            reason = f"{type(error).__name__}: {error}"
            self._tell(reason)
        return Verdict(error=f"judge {self.name!r}: {reason}")

    def _tell(self, reason: str) -> None:
        """Log a failure with its traceback the first time; a broken judge fails thousands of samples a minute."""
        if reason not in self.told and len(self.told) < MAX_TOLD:
            self.told.add(reason)
            log.warning(
                "judge %s failed; its samples keep this error, which is not logged again", self.name, exc_info=True
            )


def check_reward(answer: Any) -> Verdict:
    """The reward that a judge's answer is. Raises `ValueError` unless it and its parts are finite numbers."""
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
