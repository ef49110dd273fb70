"""The judge for reasoning-gym's rows: graders score the bare answer, in sealed processes if possible.

Invariant: a text that breaks a grader scores 0 only if the grader accepts the row's reference answer; otherwise the
sample fails. A text that a grader would run as code never reaches it: such a text is graded as an empty answer.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from rollq.buffer.common import exact_json
from rollq.buffer.common.sealing.probe import require_sealing, sealing_available
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.environments.reasoning_gym import calls
from rollq.environments.reasoning_gym.extraction import extracted
from rollq.environments.reasoning_gym.package import INSTALL, check_right, installed
from rollq.environments.reasoning_gym.plain_answers import RUN_TEXTS, is_plain
from rollq.workers.judging.builtin import BuiltInJudge
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import SCORE, Answer, InvalidReward
from rollq.workers.user_code.calls import UserFunction
from rollq.workers.user_code.real_numbers import is_real

GENERATORS: Final = "rollq.environments.reasoning_gym.generators"
"""Judge processes import this module before the seal, since it reads its package's files."""
GRADER_ERRORS: Final = "grader_errors"
"""The fact that a sample has reward 0 because its text broke the grader. The fact's mean is a curve."""
REFUSED: Final = "refused_answers"
"""The fact that a sample was graded as an empty answer, since the grader would have run its text."""


class GeneratorOptions(Settings):
    """Options of the judge, which `env` sets."""

    generator: str = Field(description="the generator")
    options: dict[str, Any] = Field(default_factory=dict, description="its options")
    trust_graders: bool = Field(
        default=False, description="use a grader that is known to be wrong, or that runs text as code without a seal"
    )


class Grader:
    """Scores texts for one generator."""

    def __init__(self, settings: GeneratorOptions, processes: JudgePool, timeout_s: float) -> None:
        self._name = settings.generator
        self._options = exact_json.dumps(dict(sorted(settings.options.items()))).decode()
        self._processes = processes
        self._timeout_s = timeout_s

    async def judge(self, prompt: Prompt, sample: Sample) -> Answer:
        """The score of a sample. Raises `SampleFailed` when the grader is at fault."""
        own = str(prompt.answer)
        answer = extracted(sample.text, own)
        if self._name not in RUN_TEXTS:
            return await self.score(prompt, answer)
        plain = is_plain(self._name, answer, own)
        return {**await self.score(prompt, answer if plain else ""), REFUSED: float(not plain)}

    async def score(self, prompt: Prompt, answer: str) -> dict[str, Any]:
        """The score of a bare answer. Raises `SampleFailed` when the grader is at fault."""
        try:
            return {**self._checked(await self._grade(prompt, answer)), GRADER_ERRORS: 0.0}
        except (JudgeFailed, InvalidReward, TimeoutError) as error:
            try:
                own = self._checked(await self._grade(prompt, None))
            except (JudgeFailed, InvalidReward, TimeoutError) as other:
                raise SampleFailed(
                    FailureKind.GRADER, f"the grader fails on the row's reference answer too: {other}"
                ) from error
            if own[SCORE] <= 0:
                raise SampleFailed(
                    FailureKind.GRADER, f"the grader fails, and scores the row's reference answer 0: {error}"
                ) from error
            return {SCORE: 0.0, GRADER_ERRORS: 1.0, "grader_error": str(error)}

    async def _grade(self, prompt: Prompt, answer: str | None) -> Answer:
        row = prompt.metadata.get("env")
        if not isinstance(row, Mapping) or "seed" not in row:
            raise SampleFailed(
                FailureKind.ENVIRONMENT, "the row has no env.seed: write its file with `rollq env export`"
            )
        place = (self._name, self._options, row["seed"])
        before = (calls.prepare, (*place, asked(prompt)))
        return await self._processes.call(calls.grade, *place, answer, timeout_s=self._timeout_s, before=before)

    @staticmethod
    def _checked(answer: Answer) -> dict[str, Any]:
        """The grader's score. Raises `InvalidReward` if the result is not a score."""
        if not isinstance(answer, Mapping):
            raise InvalidReward("its process wrote something other than a score")
        score: Any = answer.get(SCORE)
        if not (is_real(score) and 0 <= float(score) <= 1):
            raise InvalidReward(f"it returned {score!r:.80}, which is not between 0 and 1")
        return {SCORE: float(score)}


def asked(prompt: Prompt) -> str:
    """The text of the row's question: the prompt, or its last user message."""
    if isinstance(prompt.content, str):
        return prompt.content
    users = [message for message in prompt.content if message.get("role") == "user"]
    return str(users[-1].get("content", "")) if users else ""


def check_trusted(generator: str) -> None:
    """Raise `ConfigError` for a grader that is known to be wrong, or that would run text as code without a seal."""
    check_right(generator)
    if generator in RUN_TEXTS:
        require_sealing(
            f'env = "reasoning-gym:{generator}" runs the model\'s texts as code',
            "set env_options.trust_graders = true if only your own models answer",
        )


def make_judge(settings: GeneratorOptions, context: JudgeContext) -> Judge:
    """The judge for one generator. Raises `ConfigError` without the package, and for a grader that needs trust."""
    if not installed():
        raise ConfigError(f'env = "reasoning-gym:{settings.generator}" needs a package: {INSTALL}')
    if not settings.trust_graders:
        check_trusted(settings.generator)
    can_seal = not all(sealing_available().values())
    processes = context.processes.sealed(GENERATORS) if can_seal else context.processes
    grader = Grader(settings, processes, context.timeout_s)
    return Judge("reasoning-gym", UserFunction.wrap(grader.judge, None, quick=False))


JUDGE: Final = BuiltInJudge(GeneratorOptions, make_judge)
"""The judge that `env = "reasoning-gym:..."` names."""
