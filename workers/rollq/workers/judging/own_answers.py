"""Before any generation, checks that a judge accepts the first rows' reference answers.

A row's answer is tried as a string, in each form that judges expect, until one is accepted. A judge that raises on all
forms would raise on a correct sample too, so the row is unusable. It is also unusable if a judge in `COMPARING` rejects
all forms. Other judges may expect a different form. If `answer_text` gives that form, they must accept it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import FinishReason, Int32Array, Prompt, Sample, SampleStatus, Segment, VersionSpan
from rollq.workers.judging.answers import PLACEHOLDER
from rollq.workers.judging.judge import Judge
from rollq.workers.judging.options import NONE
from rollq.workers.judging.rewards import Verdict

log = logging.getLogger(__name__)

AsSample = Callable[[str], Sample]
"""Turns a text into a sample, as if an engine had generated it for the prompt."""

FIRST_ROWS: Final = 4
"""How many of a task's rows each worker checks for each judge. Refused rows do not count."""
LOOK_S: Final = 10.0
"""The longest time for judging a row in this check, in seconds."""
FORMS: Final = (
    PLACEHOLDER,
    rf"\boxed{{{PLACEHOLDER}}}",
    f"#### {PLACEHOLDER}",
    f"<answer>{PLACEHOLDER}</answer>",
    f"<think>\nSo it is.\n</think>\n<answer>\n{PLACEHOLDER}\n</answer>",
    f"The answer is {PLACEHOLDER}",
    f"Answer: {PLACEHOLDER}",
    f'{{"answer": "{PLACEHOLDER}"}}',
    f"```python\n{PLACEHOLDER}\n```",
)
"""The forms in which judges expect an answer."""
WRONG: Final = "rollq asks whether this is right"
SHOWN: Final = 80
COMPARING: Final = frozenset({"exact_match", "last_number", "math"})
"""Built-in judges that compare a text with the answer in a known form."""
UNCHECKED: Final = frozenset({"environment", "http", NONE, "regex", "weighted"})
"""Built-in judges that read no text, call others, or expect a task-specific form."""


class Judged(NamedTuple):
    """The text of a row's reference answer, the text's verdict and, if needed, a wrong text's verdict."""

    text: str
    verdict: Verdict
    wrong: Verdict | None

    @property
    def is_accepted(self) -> bool:
        """Whether the correct text gets a positive reward, or a higher reward than the wrong text."""
        reward = self.verdict.reward
        if reward is None:
            return False
        return reward > 0 or (self.wrong is not None and self.wrong.reward is not None and reward > self.wrong.reward)

    @property
    def is_interrupted(self) -> bool:
        """Whether the judge blocked the worker until a signal interrupted it: other forms would block too."""
        return _was_interrupted(self.verdict) or (self.wrong is not None and _was_interrupted(self.wrong))


def _was_interrupted(verdict: Verdict) -> bool:
    return verdict.cause is not None and isinstance(verdict.cause.__cause__, KeyboardInterrupt)


def text_of(answer: Any) -> str | None:
    """A row's answer, or the first of several answers, as a string; None for an answer that cannot be a string."""
    if isinstance(answer, list | tuple):
        return text_of(answer[0]) if answer and not isinstance(answer[0], list | tuple) else None
    if answer is None or isinstance(answer, dict):
        return None
    return answer if isinstance(answer, str) else exact_json.dumps(answer).decode()


def sample_of(
    text: str, *, prompt_ids: Int32Array, encode: Callable[[str], list[int]], sampling: Mapping[str, Any]
) -> Sample:
    """A sample for a prompt, with a text that no engine generated."""
    ids = np.array(encode(text), np.int32)
    segment = Segment(
        prompt_ids=prompt_ids,
        response_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=(VersionSpan(0, 0, len(ids)),) if len(ids) else (),
    )
    return Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, text=text, sampling=sampling)


async def judge_own_answer(
    judge: Judge, prompt: Prompt, as_sample: AsSample, forms: tuple[str, ...] = FORMS
) -> Judged | None:
    """Judge a prompt's own answer in the first form that the judge accepts, otherwise in the first form without an
    exception. Returns None for an answer that cannot be a string."""
    answer = text_of(prompt.answer)
    if answer is None:
        return None
    judgements: list[Judged] = []
    for form in forms:
        judgements.append(await _judge_form(judge, prompt, as_sample, form, answer))
        if judgements[-1].is_accepted or judgements[-1].is_interrupted:
            return judgements[-1]
    return next((judged for judged in judgements if judged.verdict.reward is not None), judgements[0])


async def _judge_form(judge: Judge, prompt: Prompt, as_sample: AsSample, form: str, answer: str) -> Judged:
    text = form.replace(PLACEHOLDER, answer)
    verdict = await judge.verdict(prompt, as_sample(text))
    needs_wrong = verdict.reward is not None and verdict.reward <= 0
    wrong = await judge.verdict(prompt, as_sample(form.replace(PLACEHOLDER, WRONG))) if needs_wrong else None
    return Judged(text, verdict, wrong)


class OwnAnswers:
    """Checks that each of a task's judges accepts the reference answers of its first rows."""

    def __init__(
        self, judge: Judge, answer_text: str | None = None, *, of_text: bool = True, may_raise: bool = False
    ) -> None:
        """`answer_text` is the form that the judge must accept, and contains `{answer}`; None means the usual forms.
        With `may_raise`, an exception means a wrong answer, so the judge may raise on other forms. With `of_text`,
        samples are only text, so a custom judge cannot depend on other fields."""
        self._judge = judge
        judges = judge.others if judge.choose else (judge,)
        self._checks = {
            id(one): _FirstAnswers(one, answer_text, of_text=of_text, may_raise=may_raise) for one in judges
        }

    @property
    def doubt(self) -> str:
        """The reason why a judge may not recognise a correct answer; empty if there is no doubt."""
        return next((check.doubt for check in self._checks.values() if check.doubt), "")

    async def problem(self, prompt: Prompt, as_sample: AsSample) -> str:
        """The reason why this prompt's samples would get wrong rewards; empty if samples may be made."""
        try:
            judge = self._judge.of(prompt)
        except ValueError as error:
            return f"judge: {error}"
        return await self._checks[id(judge)].problem(prompt, as_sample)


class _FirstAnswers:
    """The check of one judge."""

    def __init__(self, judge: Judge, answer_text: str | None, *, of_text: bool, may_raise: bool) -> None:
        self._judge = judge
        self._forms = FORMS if answer_text is None else (answer_text,)
        self._must_accept = answer_text is not None or judge.name in COMPARING
        can_check = of_text and not judge.asks_models and judge.name not in UNCHECKED
        self._refuses_errors = self._must_accept or not may_raise
        self._left = FIRST_ROWS if self._must_accept or can_check else 0
        self._accepted = 0
        self._looking = asyncio.Lock()
        self.doubt = ""

    async def problem(self, prompt: Prompt, as_sample: AsSample) -> str:
        """The reason why this prompt's samples would get wrong rewards; empty if samples may be made."""
        if not self._left:
            return ""
        async with self._looking:
            if not self._left:
                return ""
            try:
                async with asyncio.timeout(LOOK_S):
                    return await self._look(prompt, as_sample)
            except TimeoutError:
                self._left = 0
                log.info("judge %s is slow, so the first rows are not checked", self._judge.name)
                return ""

    async def _look(self, prompt: Prompt, as_sample: AsSample) -> str:
        judged = await judge_own_answer(self._judge, prompt, as_sample, self._forms)
        if judged is None:
            self._left -= 1
            return ""
        if judged.is_interrupted:
            self._left = 0
        is_wrong = judged.verdict.error and (self._refuses_errors or not judged.verdict.raised)
        if judged.is_accepted or not (self._must_accept or is_wrong):
            self._left -= 1
            self._accepted += judged.is_accepted
            if not self._left and not self._accepted:
                self._doubt(judged)
            return ""
        return described(self._judge.name, judged)

    def _doubt(self, judged: Judged) -> None:
        self.doubt = (
            f"judge {self._judge.name!r} gives the reference answers of the first rows no better reward than a wrong "
            f"text, such as {judged.text!r:.{SHOWN}}: check the judge with `rollq try`, and set judging.answer_text to "
            "the form that it expects"
        )
        log.warning("%s", self.doubt)


def described(name: str, judged: Judged) -> str:
    """The message about an unusable row, whose judge rejects the reference answer."""
    if judged.verdict.error:
        return (
            f"{judged.verdict.error}; it was given the prompt's own answer, as the text {judged.text!r:.{SHOWN}}: fix "
            "the row or the judge, or set judging.answer_text to the form that it expects"
        )
    return (
        f"judge {name!r} gives {judged.verdict.reward:g} to the prompt's own answer, as the text "
        f"{judged.text!r:.{SHOWN}}: fix the row or the judge, or set judging.answer_text to the form that it expects"
    )
