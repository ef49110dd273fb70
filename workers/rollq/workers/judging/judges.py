"""Judges by name: built-in judges, custom judges, and weighted sums of both.

A judge is a function of (prompt, sample), sync or async. It returns a reward, which is a number or a mapping of named
parts that add up to the reward, or it returns a `Credit` with rewards for single tokens or turns. Invariant: a judge
that raises, takes too long, or returns no finite number makes a *failed* sample that keeps the reason, never a reward
of 0. Only with `on_judge_error = "zero"`, a judge that raises or takes too long earns 0. A judge never delays the
worker's other samples.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import ISOLATED_JUDGE, JUDGE, POOLS_JUDGE, check_function
from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import explanation
from rollq.buffer.values.failures import SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.buffer.wire.frame_decoding import decode_sample
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from rollq.workers.judging.answers import AnswerReader
from rollq.workers.judging.builtin import SIMPLE, BuiltInJudge
from rollq.workers.judging.judge import Judge, JudgeContext, takes_pools, with_pools
from rollq.workers.judging.options import Part, WeightedOptions
from rollq.workers.judging.rewards import SCORE, Answer, Credit, Reward, Verdict
from rollq.workers.judging.token_rewards import on_last_token
from rollq.workers.user_code.calls import UserFunction


def make_judge(name: str, options: Mapping[str, Any], context: JudgeContext, setting: str = "judge_options") -> Judge:
    """Make a built-in judge, or a custom judge by dotted path. Raises `ConfigError` for an unknown judge, or for
    unsupported options, which `setting` names."""
    function = load_plugin("judge", name, BUILT_IN)
    if isinstance(function, BuiltInJudge):
        return function(_settings_of(name, function, options, setting), context)
    if options:
        raise ConfigError(f"judge {name!r} is a custom judge and takes no {setting}: {dict(options)!r}")
    return Judge(name, _custom(name, function, context), asks_models=takes_pools(function))


def answer_reader(name: str, options: Mapping[str, Any], setting: str = "judge_options") -> AnswerReader | None:
    """The function that reads the answers for the judge called `name`; None for a judge that needs no answer and for a
    custom judge. Raises `ConfigError` for unsupported options."""
    if name not in BUILT_IN:
        return None
    return BUILT_IN[name].reader(_settings_of(name, BUILT_IN[name], options, setting))


def make_parts(parts: Mapping[str, Part], context: JudgeContext) -> Judge:
    """The judge of a single part with weight 1, otherwise the weighted sum of the parts. Raises `ConfigError`."""
    only = next(iter(parts.values()))
    if len(parts) == 1 and only.weight == 1:
        return make_judge(only.judge, only.options, context, "options")
    return _weighted(WeightedOptions(parts=dict(parts)), context)


def reader_of_parts(parts: Mapping[str, Part]) -> AnswerReader | None:
    """A function that reads an answer for all parts that need it. Raises `ConfigError`."""
    readers = [answer_reader(part.judge, part.options, "options") for part in parts.values()]
    needed = [reader for reader in readers if reader is not None]
    return (lambda answer: [read(answer) for read in needed]) if needed else None


def _settings_of(name: str, judge: BuiltInJudge, options: Mapping[str, Any], setting: str) -> Any:
    try:
        return judge.options.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"{setting} of judge {name!r}: {explanation(error, judge.options)}") from error


def _custom(path: str, function: Callable[..., Any], context: JudgeContext) -> UserFunction:
    """A custom judge as a function of (prompt, sample), with bound pools if the judge takes pools."""
    if takes_pools(function):
        function = with_pools(function, POOLS_JUDGE, path, context.pools)
    if context.isolate:
        check_function(function, ISOLATED_JUDGE, path)
        return _isolated(path, context)
    check_function(function, JUDGE, path)
    return UserFunction.wrap(function, context.timeout_s, quick=False)


def _isolated(path: str, context: JudgeContext) -> UserFunction:
    """A custom judge that runs in a separate process."""
    processes, sealed = context.processes_of(path, __name__), context.isolate == "sealed"

    async def isolated(prompt: Prompt, sample: Sample) -> Answer:
        args = (path, encode_prompt(prompt).decode())
        before = (prepare_custom, args) if sealed else None
        blob = encode_samples([sample])
        return await processes.call(call_custom, *args, blob=blob, timeout_s=context.timeout_s, before=before)

    return UserFunction.wrap(isolated, None, quick=False)


def call_custom(path: str, prompt: str, sample: bytes) -> Answer:
    """Call a custom judge; this runs in a judge process."""
    answer: Answer = load_plugin("judge", path, BUILT_IN)(decode_prompt(prompt.encode()), decode_sample(sample))
    return answer


def prepare_custom(path: str, prompt: str) -> None:
    """Call a sealed judge's attribute `prepare`, a function of the prompt that caches data for later calls. Call this
    in a process that sees no model's text."""
    if prepare := getattr(load_plugin("judge", path, BUILT_IN), "prepare", None):
        prepare(decode_prompt(prompt.encode()))


def _weighted(settings: WeightedOptions, context: JudgeContext) -> Judge:
    """The weighted sum of other judges' rewards and token rewards."""
    parts = {
        name: (part.weight, make_judge(part.judge, part.options, context, "options"))
        for name, part in settings.parts.items()
    }

    async def weighted(prompt: Prompt, sample: Sample) -> Answer:
        rewards: dict[str, float] = {}
        facts: dict[str, Any] = {}
        verdicts: list[tuple[float, Verdict]] = []
        for name, (weight, judge) in parts.items():
            verdict = await judge.judge(prompt, sample)
            if verdict.reward is None:
                failure = f"part {name!r}: {verdict.error}"
                raise ValueError(failure) if verdict.raised else SampleFailed(verdict.failure, failure)
            named = {f"{name}/{part}": reward for part, reward in verdict.parts.items()} or {name: verdict.reward}
            rewards.update((part, weight * reward) for part, reward in named.items())
            facts.update((f"{name}/{fact}", value) for fact, value in {**verdict.facts, **verdict.notes}.items())
            verdicts.append((weight, verdict))
        reward = {SCORE: sum(rewards.values())} | rewards | facts if facts else rewards
        return _with_credit(reward, sample, verdicts)

    async def close() -> None:
        for _, judge in parts.values():
            await judge.close()

    others = [judge for _, judge in parts.values()]
    return Judge("weighted", UserFunction.wrap(weighted, None, quick=False), close=close, others=others)


def _with_credit(rewards: Reward, sample: Sample, verdicts: Sequence[tuple[float, Verdict]]) -> Answer:
    """The rewards, with token rewards if any verdict has some. The last token gets the other verdicts' rewards."""
    if all(verdict.token_rewards is None for _, verdict in verdicts):
        return rewards
    tokens = np.zeros(sample.response_tokens)
    for weight, verdict in verdicts:
        given = verdict.token_rewards
        tokens += weight * (on_last_token(sample, verdict.reward or 0.0) if given is None else given)
    return Credit(rewards, tokens=tokens)


BUILT_IN: Final[Mapping[str, BuiltInJudge]] = {
    **SIMPLE,
    "weighted": BuiltInJudge(WeightedOptions, _weighted, lambda settings: reader_of_parts(settings.parts)),
}
"""All built-in judges by name."""
