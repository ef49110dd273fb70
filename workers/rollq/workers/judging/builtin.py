"""The built-in judges, except `weighted`, which combines other judges and is in `judges`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.credit import TURN_REWARDS
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.judging.answers import AnswerReader, accepted, equals, expressions_of, numbers_of
from rollq.workers.judging.judge import Judge, JudgeContext, JudgeFunction
from rollq.workers.judging.matching import match_math, match_pattern
from rollq.workers.judging.numbers import are_equal
from rollq.workers.judging.numbers import last_number as find_last_number
from rollq.workers.judging.options import API_KEY, NONE, EnvironmentOptions, HttpOptions, NoOptions, RegexOptions
from rollq.workers.judging.rewards import Answer, Credit
from rollq.workers.user_code.calls import UserFunction
from rollq.workers.user_code.real_numbers import finite


@dataclass(frozen=True, slots=True)
class BuiltInJudge:
    """A built-in judge: `options` is the settings class of its options, and `make` makes the judge. `reader` returns
    the function that reads answers, or None for options that need no answer. An environment's judge, named by its
    dotted path, counts as built-in."""

    options: Any
    make: Callable[[Any, JudgeContext], Judge]
    reader: Callable[[Any], AnswerReader | None] = lambda _: None

    def __call__(self, settings: Any, context: JudgeContext) -> Judge:
        """Make the judge. Raises `ConfigError`."""
        return self.make(settings, context)


def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 if the text equals an accepted answer, otherwise 0. Raises `ValueError` without an accepted answer."""
    return float(equals(sample.text, prompt.answer))


def last_number(prompt: Prompt, sample: Sample) -> float:
    """1 if the text's last number equals the last number of an accepted answer (GSM8K's `#### 42`), otherwise 0.

    Raises `ValueError` if an answer has no number or an ambiguous one: the prompt cannot be judged.
    """
    expected = numbers_of(prompt.answer)
    written = find_last_number(sample.text)
    return float(written is not None and any(are_equal(written, number) for number in expected))


def environment(prompt: Prompt, sample: Sample) -> float:
    """The sum of the rewards that an environment gave in its steps.

    Raises `ValueError` if it gave no reward, since the sample needs a different judge, or if a custom loop's sum is not
    finite.
    """
    if (reward := sample.extra.get("environment_reward")) is None:
        raise ValueError("the sample has no rewards of an environment; use another judge")
    return finite(reward, "environment_reward is a number, which")


def _plain(function: JudgeFunction) -> Callable[[NoOptions, JudgeContext], Judge]:
    def make(settings: NoOptions, context: JudgeContext) -> Judge:
        return Judge(function.__name__, UserFunction.wrap(function, context.timeout_s, quick=True))

    return make


def _none(settings: NoOptions, context: JudgeContext) -> Judge:
    def none(prompt: Prompt, sample: Sample) -> Answer:
        raise AssertionError("its samples are judged together")

    return Judge(NONE, UserFunction.wrap(none, None, quick=True))


def _environment(settings: EnvironmentOptions, context: JudgeContext) -> Judge:
    def judge(prompt: Prompt, sample: Sample) -> Answer:
        reward = environment(prompt, sample)
        return Credit(reward, turns=sample.extra.get(TURN_REWARDS)) if settings.turn_rewards else reward

    return Judge("environment", UserFunction.wrap(judge, context.timeout_s, quick=True))


def _regex(settings: RegexOptions, context: JudgeContext) -> Judge:
    """Make a judge that runs in a process, since some patterns never end on some texts and would block the
    interpreter."""

    async def regex(prompt: Prompt, sample: Sample) -> Answer:
        answer = accepted(prompt.answer) if settings.compare else ()
        args = (sample.text, answer, settings.pattern, settings.compare)
        return await context.processes.call(match_pattern, *args, timeout_s=context.timeout_s)

    return Judge("regex", UserFunction.wrap(regex, None, quick=False))


def _math(settings: NoOptions, context: JudgeContext) -> Judge:
    try:
        import math_verify  # noqa: F401 - a missing package fails at the start, not with every sample
    except ModuleNotFoundError as error:
        raise ConfigError(f"judge 'math' needs the package {error.name!r}: pip install 'rollq[math]'") from error

    async def judge(prompt: Prompt, sample: Sample) -> Answer:
        args = (sample.text, prompt.answer)
        return await context.processes.call(match_math, *args, timeout_s=context.timeout_s)

    return Judge("math", UserFunction.wrap(judge, None, quick=False))


def _http(settings: HttpOptions, context: JudgeContext) -> Judge:
    caller = settings.caller([settings.url], API_KEY)

    async def http(prompt: Prompt, sample: Sample) -> Any:
        question = {"prompt": prompt.content, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
        answer = await caller.post({**question, "text": sample.text})
        if not isinstance(answer, dict) or "reward" not in answer:
            raise ValueError(f"{settings.url} answered {answer!r:.200}; expected an object with a 'reward'")
        return answer["reward"]

    return Judge("http", UserFunction.wrap(http, context.timeout_s, quick=False), close=caller.close)


SIMPLE: Final[Mapping[str, BuiltInJudge]] = {
    "exact_match": BuiltInJudge(NoOptions, _plain(exact_match), lambda _: accepted),
    "last_number": BuiltInJudge(NoOptions, _plain(last_number), lambda _: numbers_of),
    "environment": BuiltInJudge(EnvironmentOptions, _environment),
    "regex": BuiltInJudge(RegexOptions, _regex, lambda settings: accepted if settings.compare else None),
    "math": BuiltInJudge(NoOptions, _math, lambda _: expressions_of),
    "http": BuiltInJudge(HttpOptions, _http),
    NONE: BuiltInJudge(NoOptions, _none),
}
"""The built-in judges by name, except `weighted`."""
