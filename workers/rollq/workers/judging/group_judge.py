"""Group judges: custom functions that reward all of a group's samples together.

A group judge is a function of (prompt, samples), sync or async, that returns a list with an entry per sample: a reward,
as from a judge; a `Credit`; or None, which fails that sample. Invariant: if a judge raises, takes too long, or returns
anything else, the group fails and keeps the reason; no sample gets a reward of 0 instead.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import GROUP_JUDGE, ISOLATED_GROUP_JUDGE, POOLS_GROUP_JUDGE, check_function
from rollq.buffer.errors import RollqError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from rollq.workers.judging.judge import JudgeContext, takes_pools, with_pools
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import (
    SCORE,
    Credit,
    InvalidReward,
    Verdict,
    check_answer,
    check_reward,
    plain_credit,
    plain_verdict,
)
from rollq.workers.user_code.call_slots import CallsHang
from rollq.workers.user_code.calls import UserFunction, guarded
from rollq.workers.user_code.errors import reason_of, said_by

log = logging.getLogger(__name__)

ENTRIES: Final = "entries"
"""The name of the list in a process's answer."""


class GroupNotJudged(RollqError):
    """A group judge failed. The message has the judge's name and the reason. `kind` is the samples' failure kind."""

    def __init__(self, reason: str, kind: FailureKind = FailureKind.GRADER) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class GroupJudge:
    """A group judge with its name."""

    name: str
    call: UserFunction

    async def verdicts(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        """A verdict for each of these completed samples; None becomes a verdict with an error. Raises
        `GroupNotJudged`."""
        try:
            entries = await self.call(prompt, tuple(samples))
            with guarded():
                return [self._verdict(answer, sample) for answer, sample in _paired(entries, samples)]
        except SampleFailed as error:
            raise GroupNotJudged(f"group judge {self.name!r}: {said_by(error)}", error.kind) from error
        except Exception as error:
            known = isinstance(error, TimeoutError | JudgeFailed | InvalidReward)
            reason = str(error) if known else reason_of(error)
            if isinstance(error, CallsHang):
                reason = f"{error}; set judging.isolate_judge = true to kill calls that take too long"
            raise GroupNotJudged(f"group judge {self.name!r}: {reason}") from error

    def _verdict(self, answer: Any, sample: Sample) -> Verdict:
        if answer is None:
            return Verdict(error=f"group judge {self.name!r}: returned None for this sample")
        return check_answer(answer, sample)


def make_group_judge(path: str, context: JudgeContext) -> GroupJudge:
    """The group judge with this dotted path. Raises `ConfigError` if it does not exist or cannot be called."""
    function = load_plugin("group judge", path, {})
    if takes_pools(function):
        function = with_pools(function, POOLS_GROUP_JUDGE, path, context.pools)
    check_function(function, ISOLATED_GROUP_JUDGE if context.isolate else GROUP_JUDGE, path)
    if context.isolate:
        processes = context.processes_of(path, __name__)
        return GroupJudge(
            path, UserFunction.wrap(partial(_isolated, path, processes, context.timeout_s), None, quick=False)
        )
    return GroupJudge(path, UserFunction.wrap(_listing(function), context.timeout_s, quick=False))


async def _isolated(
    path: str, processes: JudgePool, timeout_s: float, prompt: Prompt, samples: Sequence[Sample]
) -> list[Any]:
    args, blob = (path, encode_prompt(prompt).decode()), encode_samples(samples)
    answer: Any = await processes.call(call_group_judge, *args, blob=blob, timeout_s=timeout_s)
    return [Credit(**entry) if entry and "tokens" in entry else entry and entry["reward"] for entry in answer[ENTRIES]]


def call_group_judge(path: str, prompt: str, samples: bytes) -> Mapping[str, Any]:
    """Call a group judge in a judge process. The process must answer with a reward, so the list is a fact beside the
    reward."""
    judge: Callable[..., Any] = load_plugin("group judge", path, {})
    given = tuple(decode_samples(samples))
    entries = _entries(judge(decode_prompt(prompt.encode()), given))
    return {SCORE: 0.0, ENTRIES: [_plain(answer) for answer, _ in _paired(entries, given)]}


def _plain(answer: Any) -> Mapping[str, Any] | None:
    """An entry as JSON. Raises `ValueError` for an entry that is not a reward."""
    if answer is None:
        return None
    return plain_credit(answer) if isinstance(answer, Credit) else {"reward": plain_verdict(check_reward(answer))}


def _listing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A group judge whose entries are read within its call: reading an iterator runs its code, which may block."""

    async def waiting(prompt: Prompt, samples: Sequence[Sample]) -> Any:
        return await _awaited(function(prompt, samples))

    def blocking(prompt: Prompt, samples: Sequence[Sample]) -> Any:
        answers = function(prompt, samples)
        return _awaited(answers) if inspect.isawaitable(answers) else _entries(answers)

    return waiting if inspect.iscoroutinefunction(function) else blocking


async def _awaited(answers: Awaitable[Any]) -> list[Any]:
    return _entries(await answers)


def _entries(answers: Any) -> list[Any]:
    """An answer's entries. Raises `ValueError` for an answer that is not a list."""
    if not isinstance(answers, Iterable) or isinstance(answers, str | bytes | Mapping | set | frozenset):
        raise ValueError(f"returned {answers!r:.200}; expected a list with an entry for each sample")
    return list(answers)


def _paired(entries: Sequence[Any], samples: Sequence[Sample]) -> list[tuple[Any, Sample]]:
    """Each entry with its sample. Raises `ValueError` unless each sample has an entry."""
    if len(entries) != len(samples):
        raise ValueError(f"returned {len(entries)} entries for {len(samples)} samples; expected one for each")
    return list(zip(entries, samples, strict=True))
