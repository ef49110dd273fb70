"""Tries a task's rows without a buffer: renders prompts, judges texts, and makes samples."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.workers.agents.loops import failed_with
from rollq.workers.engines.protocol import Engine, Tokenizer
from rollq.workers.groups.lone_rollouts import rollout_of
from rollq.workers.groups.read_prompts import read_prompt
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.sample_judging import own_verdict
from rollq.workers.judging.group_judge import GroupJudge, GroupNotJudged
from rollq.workers.judging.options import NONE
from rollq.workers.judging.own_answers import FORMS, UNCHECKED, AsSample, Judged, judge_own_answer
from rollq.workers.judging.rewards import Verdict, failed_as_wrong
from rollq.workers.user_code.errors import reason_of

MOST_SAMPLES: Final = 100_000
"""How many samples run at the same time if the agent loop sets no limit."""


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A sample, its verdict, and the duration of judging."""

    sample: Sample
    verdict: Verdict
    judge_s: float

    @property
    def text(self) -> str:
        return self.sample.text

    @property
    def tokens(self) -> int:
        return self.sample.response_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether the sample ended at the token limit."""
        return self.sample.finish_reason is FinishReason.LENGTH


@dataclass(slots=True)
class TriedRow:
    """A row: its rendered prompt, the judged texts, and the samples."""

    place: str
    prompt: Prompt
    shown: str = ""
    prompt_tokens: int = 0
    own: Judged | None = None
    given: JudgedText | None = None
    samples: list[JudgedText] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether the samples have equal rewards, so that a model would learn nothing from them."""
        return len({sample.verdict.reward for sample in self.samples}) == 1


class Trying:
    """Tries rows of one task with its recipe."""

    def __init__(self, task: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._task = task
        self._recipe = recipe
        self._tokenizer = recipe.tokenizer(tokenizer)
        self._places = asyncio.Semaphore(recipe.sessions or MOST_SAMPLES)

    async def look(self, row: TriedRow, given: str | None) -> None:
        """Render a row's prompt, and judge the text `given`, or the row's own answer."""
        settings = self._recipe.settings
        try:
            read = await read_prompt(row.prompt, self._tokenizer)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a template or a tokenizer may raise anything
            row.problems.append(f"{row.place}: the prompt cannot be turned into tokens: {reason_of(error)}")
            return
        ids = read.ids.tolist()
        row.shown, row.prompt_tokens = self._tokenizer.decode(ids, special=True), len(ids)
        if len(ids) > settings.max_prompt_tokens:
            row.problems.append(
                f"{row.place}: the prompt has {len(ids)} tokens, more than max_prompt_tokens = "
                f"{settings.max_prompt_tokens}"
            )
        as_sample = self._recipe.as_sample(read)
        if given is not None:
            row.given = await self._judged(row.prompt, as_sample(given))
            self._note_error(row, row.given)
        elif self._recipe.judge.name != NONE:
            await self._look_at_answer(row, as_sample)

    async def _look_at_answer(self, row: TriedRow, as_sample: AsSample) -> None:
        """Judge the row's answer."""
        form, judge = self._recipe.settings.answer_text, self._recipe.judge.of(row.prompt)
        row.own = await judge_own_answer(judge, row.prompt, as_sample, FORMS if form is None else (form,))
        if row.own is not None and (form is not None or judge.name not in UNCHECKED):
            self._note_own(row, row.own, judge.name)

    async def sample(self, rows: Iterable[TriedRow], engine: Engine, seed: int) -> None:
        """Sample a group for each row, and judge it."""
        await asyncio.gather(*(self._sample_group(row, engine, seed) for row in rows))

    async def _sample_group(self, row: TriedRow, engine: Engine, seed: int) -> None:
        size = self._recipe.settings.group_size
        made = await asyncio.gather(*(self._sample(row, index, engine, seed) for index in range(size)))
        judged = [one for one in made if one is not None]
        if judged and (group_judge := self._recipe.group_judge):
            judged = await self._judged_together(row.prompt, group_judge, judged)
        row.samples += judged
        for one in judged:
            self._note_error(row, one)

    async def _sample(self, row: TriedRow, index: int, engine: Engine, seed: int) -> JudgedText | None:
        recipe = self._recipe
        try:
            rollout = rollout_of(self._task, recipe.settings, row.prompt, index, seed, self._tokenizer, engine.generate)
            async with self._places:
                made = await recipe.loop.run(rollout)
        except Exception as error:  # noqa: BLE001 - a custom loop may raise anything
            row.problems.append(f"{row.place}: {failed_with(error).error}")
            return None
        return await self._judged(row.prompt, made)

    async def _judged_together(self, prompt: Prompt, judge: GroupJudge, samples: list[JudgedText]) -> list[JudgedText]:
        """The samples with rewards from their group judge; failed samples are unchanged."""
        started_s = monotonic()
        given = [
            replace(
                sample.sample,
                reward=sample.verdict.reward,
                reward_parts={**sample.verdict.parts, **sample.verdict.facts},
            )
            for sample in samples
            if not sample.verdict.error
        ]
        try:
            verdicts = iter(await judge.verdicts(prompt, given))
        except GroupNotJudged as error:
            verdicts = iter([Verdict(error=str(error))] * len(given))
        each_s = (monotonic() - started_s) / len(samples)
        return [
            sample if sample.verdict.error else JudgedText(sample.sample, next(verdicts), sample.judge_s + each_s)
            for sample in samples
        ]

    async def _judged(self, prompt: Prompt, sample: Sample) -> JudgedText:
        started_s = monotonic()
        if sample.status is not SampleStatus.COMPLETED:
            verdict = Verdict(error=sample.error or "the sample was not completed")
        elif sample.reward is not None:
            verdict = own_verdict(sample)
        else:
            verdict = await self._recipe.judge.verdict(prompt, sample)
            if verdict.raised and self._recipe.settings.on_judge_error == "zero":
                verdict = failed_as_wrong(verdict)
        return JudgedText(sample, verdict, monotonic() - started_s)

    def _note_error(self, row: TriedRow, judged: JudgedText) -> None:
        if judged.verdict.error:
            row.problems.append(f"{row.place}: {judged.verdict.error}")

    def _note_own(self, row: TriedRow, own: Judged, judge: str) -> None:
        if own.verdict.error:
            row.problems.append(
                f"{row.place}: {own.verdict.error}; the text was the row's own answer: set "
                "judging.answer_text to the form that the judge expects"
            )
        elif not own.is_accepted:
            row.problems.append(
                f"{row.place}: judge {judge!r} gives {own.verdict.reward:g} to the row's own answer, and no "
                "less to a wrong text: set judging.answer_text to the form that the judge expects"
            )


def facts_of(verdict: Verdict) -> dict[str, Any]:
    """The parts of a reward and the judge's other facts, by name."""
    return {**verdict.parts, **verdict.facts, **verdict.notes}
