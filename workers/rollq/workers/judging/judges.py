"""Judges: what a finished sample is worth.

A judge is a function of (prompt, sample), sync or async, that returns a reward: a number, or named parts that add up to
it. Invariant: a judge that raises, takes too long or returns no finite number makes a *failed* sample with the reason
kept, never a reward of 0; and it never holds up the other samples of its worker.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.log_once import LogOnce
from rollq.buffer.plugins import check_parameters, load_plugin
from rollq.buffer.rollouts import Prompt, Sample
from rollq.buffer.settings_errors import explanation
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from rollq.buffer.wire.samples import decode_sample, encode_sample
from rollq.workers.http.pools import ModelPool
from rollq.workers.judging.matching import last_number as find_last_number
from rollq.workers.judging.matching import match_math, match_pattern
from rollq.workers.judging.options import API_KEY, HttpOptions, NoOptions, RegexOptions, WeightedOptions
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import Reward, Verdict, check_reward
from rollq.workers.user_code import UserFunction

log = logging.getLogger(__name__)

JudgeFunction = Callable[[Prompt, Sample], Reward | Awaitable[Reward]]
Close = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """What judges are made with: the time for one sample, processes for those that need the CPU, auxiliary models.

    `isolate`: a judge of one's own runs in these processes too."""

    timeout_s: float
    processes: JudgePool
    isolate: bool = False
    pools: Mapping[str, ModelPool] = field(default_factory=dict)


async def nothing_to_close() -> None:
    """Of judges that hold no connections."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge by its name."""

    name: str
    call: UserFunction
    close: Close = nothing_to_close
    failures: LogOnce = field(default_factory=lambda: LogOnce(log))

    async def judge(self, prompt: Prompt, sample: Sample) -> Verdict:
        """The reward of a completed sample, or why it has none."""
        try:
            return check_reward(await self.call(prompt, sample))
        except TimeoutError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a judge's failure is its sample's, whatever it is
            reason = str(error) if isinstance(error, JudgeFailed) else f"{type(error).__name__}: {error}"
            message = "judge %s failed; its samples keep this error, which is not logged again"
            self.failures.warning(reason, message, self.name, exc_info=True)
        return Verdict(error=f"judge {self.name!r}: {reason}")


def make_judge(name: str, options: Mapping[str, Any], tools: JudgeContext) -> Judge:
    """A built-in judge, or one's own by dotted path. Raises `ConfigError` when there is none such, or for options that
    it does not take."""
    if name in BUILT_IN:
        settings_class, make = BUILT_IN[name]
        try:
            settings = settings_class.model_validate(options)
        except ValidationError as error:
            raise ConfigError(f"judge_options of judge {name!r}: {explanation(error, settings_class)}") from error
        return make(settings, tools)
    if options:
        raise ConfigError(f"judge {name!r} is your own and takes no judge_options: {dict(options)!r}")
    return Judge(name, _own(name, tools))


def _own(path: str, tools: JudgeContext) -> UserFunction:
    function = load_plugin("judge", path, BUILT_IN)
    if _takes_pools(function):
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"judge {path!r} takes pools: it must be async, to ask them")
        if not tools.pools:
            raise ConfigError(f"judge {path!r} takes pools, and there are none: add [worker.pools.<name>]")
        function = partial(function, pools=tools.pools)
    check_parameters("judge", path, function, "prompt", "sample")
    if not tools.isolate:
        return UserFunction.of(function, tools.timeout_s, quick=False)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"judge {path!r} is async: isolate_judge is for functions that block")

    async def isolated(prompt: Prompt, sample: Sample) -> Reward:
        args = (path, encode_prompt(prompt).decode())
        return await tools.processes.call(call_own, *args, blob=encode_sample(sample), timeout_s=tools.timeout_s)

    return UserFunction.of(isolated, None, quick=False)


def _takes_pools(function: Callable[..., Any]) -> bool:
    try:
        return "pools" in inspect.signature(function).parameters
    except ValueError:  # written in C
        return False


def call_own(path: str, prompt: str, sample: bytes) -> Reward:
    """One's own judge, in another process."""
    reward: Reward = load_plugin("judge", path, BUILT_IN)(decode_prompt(prompt.encode()), decode_sample(sample))
    return reward


def answer_text(prompt: Prompt) -> str:
    """The answer as text. Raises `ValueError` without one: such a prompt cannot be judged by it."""
    if prompt.answer is None:
        raise ValueError("the prompt has no answer")
    return str(prompt.answer)


def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 when the text equals the answer, spaces around both left out; else 0."""
    return float(sample.text.strip() == answer_text(prompt).strip())


def last_number(prompt: Prompt, sample: Sample) -> float:
    """1 when the last number of the text equals the last number of the answer (`#### 42` of GSM8K); else 0.

    Raises `ValueError` when the answer holds no number: such a prompt cannot be judged.
    """
    expected = find_last_number(answer_text(prompt))
    if expected is None:
        raise ValueError(f"the answer {prompt.answer!r:.80} holds no number")
    return float(find_last_number(sample.text) == expected)


def environment(prompt: Prompt, sample: Sample) -> float:
    """The sum of the rewards that an environment gave in its steps.

    Raises `ValueError` when it gave none: such a sample needs another judge.
    """
    if "environment_reward" not in sample.extra:
        raise ValueError("the sample has no rewards of an environment; use another judge")
    return float(sample.extra["environment_reward"])


def _plain(function: JudgeFunction) -> Callable[[NoOptions, JudgeContext], Judge]:
    def make(settings: NoOptions, tools: JudgeContext) -> Judge:
        return Judge(function.__name__, UserFunction.of(function, tools.timeout_s, quick=True))

    return make


def _regex(settings: RegexOptions, tools: JudgeContext) -> Judge:
    """A pattern may take for ever on some text, and holds the interpreter meanwhile."""

    async def regex(prompt: Prompt, sample: Sample) -> Reward:
        answer = answer_text(prompt) if settings.compare else ""
        args = (sample.text, answer, settings.pattern, settings.compare)
        return await tools.processes.call(match_pattern, *args, timeout_s=tools.timeout_s)

    return Judge("regex", UserFunction.of(regex, None, quick=False))


def _math(settings: NoOptions, tools: JudgeContext) -> Judge:
    try:
        import math_verify  # noqa: F401 - said at start, not with every sample
    except ModuleNotFoundError as error:
        raise ConfigError(f"judge 'math' needs the package {error.name!r}: pip install 'rollq[math]'") from error

    async def judge(prompt: Prompt, sample: Sample) -> Reward:
        args = (sample.text, answer_text(prompt))
        return await tools.processes.call(match_math, *args, timeout_s=tools.timeout_s)

    return Judge("math", UserFunction.of(judge, None, quick=False))


def _http(settings: HttpOptions, tools: JudgeContext) -> Judge:
    caller = settings.caller([settings.url], API_KEY)

    async def http(prompt: Prompt, sample: Sample) -> Reward:
        question = {"prompt": prompt.content, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
        answer = await caller.post({**question, "text": sample.text})
        if not isinstance(answer, dict) or "reward" not in answer:
            raise ValueError(f"{settings.url} answered {answer!r:.200}; an object with a 'reward' is needed")
        reward: Reward = answer["reward"]
        return reward

    return Judge("http", UserFunction.of(http, tools.timeout_s, quick=False), close=caller.close)


def _weighted(settings: WeightedOptions, tools: JudgeContext) -> Judge:
    judges = {name: (part.weight, make_judge(part.judge, part.options, tools)) for name, part in settings.parts.items()}

    async def weighted(prompt: Prompt, sample: Sample) -> Reward:
        parts: dict[str, float] = {}
        for name, (weight, judge) in judges.items():
            verdict = await judge.judge(prompt, sample)
            if verdict.reward is None:
                raise ValueError(f"part {name!r}: {verdict.error}")
            named = {f"{name}/{part}": reward for part, reward in verdict.parts.items()} or {name: verdict.reward}
            parts.update((part, weight * reward) for part, reward in named.items())
        return parts

    async def close() -> None:
        for _, judge in judges.values():
            await judge.close()

    return Judge("weighted", UserFunction.of(weighted, None, quick=False), close=close)


def needs_answer(name: str) -> bool:
    """Whether the judge called `name` cannot judge a prompt without an answer; a custom judge may not need one."""
    return name in _COMPARING


_COMPARING = frozenset({"exact_match", "last_number", "math"})
"""Built-in judges that compare with the prompt's answer, whatever their options."""

BUILT_IN: Final[Mapping[str, tuple[Any, Callable[[Any, JudgeContext], Judge]]]] = {
    "exact_match": (NoOptions, _plain(exact_match)),
    "last_number": (NoOptions, _plain(last_number)),
    "environment": (NoOptions, _plain(environment)),
    "regex": (RegexOptions, _regex),
    "math": (NoOptions, _math),
    "http": (HttpOptions, _http),
    "weighted": (WeightedOptions, _weighted),
}
"""Name -> its options' settings, and what makes it."""
