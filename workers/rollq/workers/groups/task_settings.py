"""The workers' part of a task or an evaluation in `rollq.toml`: how to generate and judge samples."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollq.buffer.rules.settings import PromptLength, Settings, TaskRules
from rollq.workers.engines.protocol import Sampling
from rollq.workers.groups.agent_loops import gives_rewards
from rollq.workers.judging.answers import PLACEHOLDER
from rollq.workers.judging.options import NONE
from rollq.workers.judging.per_row import JudgesByColumn, names_of

NOT_TRAINED: Final = (
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "guided_json",
    "guided_regex",
)
"""Sampling parameters that change a token's distribution in a way that the trainer's logprobs do not reflect."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class SamplingSettings(PromptLength):
    """How the tokens of a sample are drawn, and how many are allowed."""

    max_tokens: int = Field(default=1024, gt=0, description="most new tokens in one sample")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0, in evaluations: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="cumulative probability of the tokens drawn from")
    top_k: int = Field(default=0, ge=0, description="number of most likely tokens drawn from; 0: all")
    stop: tuple[str, ...] = Field(default=(), description="texts that end a sample")
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), description="tokens that end a sample, in addition to EOS")
    ignore_eos: bool = Field(default=False, description="whether samples continue after EOS")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="lowest probability of a token, as a fraction of the likeliest one's"
    )
    min_tokens: int = Field(default=0, ge=0, description="new tokens before which a sample cannot end with a token")
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="factor against tokens of the prompt and of the answer so far; 1: none"
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="subtracted from the logits of tokens already in the answer"
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="subtracted from a token's logit for each occurrence in the answer so far"
    )
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="token ids in quotes, and what is added to their logits"
    )
    bad_words: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that a sample cannot contain"
    )
    guided_json: dict[str, Any] | None = Field(default=None, description="JSON schema that samples follow")
    guided_regex: str | None = Field(
        default=None, min_length=1, description="regular expression that samples match as a whole"
    )

    @model_validator(mode="after")
    def _sampling_is_possible(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens}: must not exceed max_tokens = {self.max_tokens}")
        if self.guided_json is not None and self.guided_regex is not None:
            raise ValueError("guided_json and guided_regex: only one can guide a sample; leave the other out")
        return self

    def sampling(self, seed: int | None) -> Sampling:
        """Every sampling parameter of one sample, including `seed`. Greedy means the likeliest token at temperature
        1."""
        chosen = {name: getattr(self, name) for name in _SAMPLING_KEYS}
        if not self.temperature:
            chosen |= {"temperature": 1.0, "top_k": 1}
        return Sampling(seed=seed, **chosen)


_SAMPLING_KEYS = tuple(SamplingSettings.model_fields.keys() - {"max_prompt_tokens"})


class JudgeSettings(Settings):
    """How a finished sample gets its reward."""

    judge: str | dict[str, Any] = Field(
        default="exact_match",
        description="name of a built-in judge, or the dotted path of a custom one; or a table: field names a column, "
        "the other keys are its values, each with a judge",
    )
    judge_options: dict[str, Any] = Field(default_factory=dict, description="options of a built-in judge")
    isolate_judge: Literal[False, True, "sealed"] = Field(
        default=False,
        description="run a custom judge in a separate process, which may hang or crash, not in a thread; sealed: in "
        "a process for model-written code, which can only compute",
    )
    answer_text: str | None = Field(
        default=None,
        description="a right sample's text, with {answer} in it: before anything is generated, the judge must accept "
        "the first rows' reference answers in this form; default: forms that judges often expect",
    )
    on_judge_error: Literal["fail", "zero"] = Field(
        default="fail",
        description="a sample for which the judge raises or takes too long fails, or gets reward 0 and is trained",
    )

    @field_validator("judge", mode="before")
    @classmethod
    def _names_judges(cls, value: Any) -> Any:
        if isinstance(value, dict):
            JudgesByColumn.parse(value)
        elif not isinstance(value, str):
            raise ValueError("must be a string in quotes, or a table")
        return value

    @model_validator(mode="after")
    def _options_are_beside_their_judge(self) -> Self:
        if self.judge_options and not isinstance(self.judge, str):
            raise ValueError(
                'judge_options: judge is a table, so options belong to one of its judges, as in { judge = "regex", '
                "options = { ... } }"
            )
        return self

    @field_validator("answer_text")
    @classmethod
    def _has_the_answer(cls, value: str | None) -> str | None:
        if value is not None and PLACEHOLDER not in value:
            raise ValueError(f"must contain {PLACEHOLDER}, the place of a row's answer")
        return value


class RolloutSettings(SamplingSettings, JudgeSettings):
    """How a worker makes and judges a sample, whether it is for training or for an evaluation."""

    agent_loop: str = Field(
        default="single_turn", description="name of a built-in agent loop, or the dotted path of a custom one"
    )
    agent_options: dict[str, Any] = Field(default_factory=dict, description="options of the agent loop")
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="values for names in the model's chat template, such as enable_thinking"
    )

    @model_validator(mode="after")
    def _something_gives_a_reward(self) -> Self:
        if self.judge == NONE and not getattr(self, "group_judge", None):
            raise ValueError(
                'judge = "none" gives no reward; set judging.group_judge, which rewards whole groups of a task, or '
                "name a judge"
            )
        return self

    @model_validator(mode="after")
    def _loop_gives_the_judged_rewards(self) -> Self:
        if "environment" in names_of(self.judge) and not gives_rewards(self.agent_loop):
            raise ValueError(
                'judge = "environment" adds up the rewards of an environment, but agent_loop = '
                f'"{self.agent_loop}" has none; set agent_loop = "environment", or choose another judge'
            )
        return self


class WorkerTask(TaskRules, RolloutSettings):
    """Everything that a worker needs to know about a task."""

    group_judge: str | None = Field(
        default=None,
        description="dotted path of a function that rewards all samples of a group together; runs after judge, if "
        "given",
    )
    scorers: tuple[str, ...] = Field(
        default=(), description="names of [worker.pools] whose logprob of every token is added to each sample"
    )
    filters: tuple[str, ...] = Field(
        default=(),
        description="zero_advantage drops groups whose rewards are equal, overlong leaves samples that were cut off "
        "at max_tokens out of the loss; a dotted path names a custom filter",
    )
    spread: Literal["never", "tail"] = Field(
        default="tail", description="whether idle workers make samples of other workers' groups (tail), or never do"
    )
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="last tokens before max_tokens, over which overlong_penalty grows linearly from 0"
    )
    overlong_penalty: float = Field(
        default=1.0, ge=0, description="amount subtracted from the reward of a sample that reaches max_tokens"
    )

    @model_validator(mode="before")
    @classmethod
    def _samples_are_judged_together(cls, data: Any) -> Any:
        return {"judge": NONE, **data} if isinstance(data, dict) and data.get("group_judge") else data

    @model_validator(mode="after")
    def _training_knows_the_distribution(self) -> Self:
        if self.kind == "train" and not self.temperature:
            raise ValueError(
                "temperature = 0: all samples of a group would be the same, so there is nothing to train; it is for "
                "[evaluations.<name>]"
            )
        set_ = self.sampling(None).rare()
        if self.kind == "train" and (refused := [f"{name} = {set_[name]!r}" for name in NOT_TRAINED if name in set_]):
            raise ValueError(
                f"{', '.join(refused)}: changes the distribution that tokens are drawn from, but the trainer computes "
                "logprobs from the logits and the temperature alone, so importance ratios would be wrong; leave it out "
                "of a task that is trained, or set it in [evaluations.<name>.sampling]"
            )
        return self

    @model_validator(mode="after")
    def _penalty_starts_within_the_limit(self) -> Self:
        if self.overlong_buffer_tokens > self.max_tokens:
            raise ValueError(
                f"overlong_buffer_tokens = {self.overlong_buffer_tokens}: must not exceed max_tokens = "
                f"{self.max_tokens}, because the penalty starts that many tokens before this limit"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_have_an_advantage(self) -> Self:
        if "zero_advantage" in self.filters and self.group_size == 1:
            raise ValueError(
                "filters: zero_advantage drops groups in which all rewards are equal, as they always are in groups of "
                "one sample; raise group_size or leave the filter out"
            )
        return self
