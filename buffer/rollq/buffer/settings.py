"""Settings that every role shares: the run, its server, its tasks. Read from `rollq.toml` by `rollq.cli.settings`.

Unknown keys are errors everywhere. Each role adds its own section, defined in its own package.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from rollq.buffer.staleness import stale_threshold

MAX_BATCH_GROUPS = 1000


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, defaults validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def problems(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """What is wrong with given values, each with its place, in one line; `model`, if known, tells what is allowed."""
    allowed = "" if model is None else f"; allowed here: {', '.join(model.model_fields) or 'none'}"
    lines = []
    for each in error.errors(include_url=False):
        path = ".".join(map(str, each["loc"]))
        if each["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown{allowed if len(each['loc']) == 1 else ''}")
        else:
            lines.append(f"{path}: {each['msg']}")
    return "; ".join(lines)


class RedisSettings(Settings):
    """Where the servers are. `queue_url` defaults to `buffer_url`; passwords belong in `ROLLQ_REDIS_PASSWORD`."""

    buffer_url: str = "redis://127.0.0.1:6379/0"
    queue_url: str | None = None
    password: SecretStr | None = None


class TaskRules(Settings):
    """What the buffer's functions need to know of a task; stored in its clock, the same for every role."""

    batch_groups: int = Field(ge=0, le=MAX_BATCH_GROUPS, description="groups of this task in one training batch")
    group_size: int = Field(default=8, gt=0, le=1024, description="samples of one prompt")
    max_staleness: int = Field(default=1, ge=0, description="how many syncs old a token may be when it is trained")
    sync_weights_interval: int = Field(default=1, gt=0, description="train steps between two publications of weights")
    order: Literal["staleness", "fifo"] = "staleness"
    expiry: Literal["member", "group"] = "member"
    kind: Literal["train", "eval"] = Field(default="train", description="what its groups are for")
    schedule: tuple[tuple[int, int], ...] = Field(
        default=(), description="(step, groups) pairs: from that train step on, batches take so many groups"
    )
    tail_batch_trigger_size: int = Field(
        default=0, ge=-1, description="0: expired groups are sampled again at once; N: once N have expired; -1: never"
    )
    tail_batch_max_tries: int | None = Field(
        default=None, gt=0, description="interruptions after which a group is not interrupted again; default: no limit"
    )
    stragglers: Literal["wait", "expire"] = "wait"
    max_token_staleness: int | None = Field(
        default=None, ge=0, description="syncs after which a token is masked out of the loss; default: never"
    )
    max_uses: int = Field(default=1, gt=0, description="how many times a group may be trained")
    reuse_cooldown_steps: int = Field(default=0, ge=0, description="train steps between two uses of a group")
    keep_window: int = Field(default=256, gt=0, le=10_000, description="finished groups that the keep rate is made of")
    prompt_stats: bool = Field(default=False, description="keep statistics of every prompt")
    pass_reward: float = Field(default=0.5, description="a sample with at least this reward counts as passed")
    partial_rollout: bool = False
    min_valid_samples: int | None = Field(default=None, gt=0, description="default: all of group_size")
    max_tries: int = Field(default=3, gt=0, description="attempts that end in an engine error before a group fails")
    max_deaths: int = Field(default=3, ge=2, description="workers that may die with a group before its quarantine")
    lease_s: float = Field(default=30.0, gt=0)
    audit_groups: int = Field(default=1000, ge=0, description="failed and filtered groups kept for audit, each")
    max_uncheckpointed_steps: int = Field(default=100, gt=0)
    resume: Literal["durable", "fresh"] = "durable"

    @property
    def stale_threshold(self) -> int:
        """A group is too old when the staleness of one of its tokens reaches this (train steps)."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    @property
    def token_threshold(self) -> int:
        """A token is masked when its staleness reaches this (train steps)."""
        syncs = self.max_staleness if self.max_token_staleness is None else self.max_token_staleness
        return stale_threshold(syncs, self.sync_weights_interval)

    @model_validator(mode="after")
    def _rules_agree(self) -> Self:
        if self.tail_batch_trigger_size == -1 and self.tail_batch_max_tries is not None:
            raise ValueError(
                "tail_batch_max_tries is for groups that are sampled again; with tail_batch_trigger_size = -1 what "
                "expires is dropped: leave one of them out"
            )
        if self.max_token_staleness is not None and self.max_token_staleness > self.max_staleness:
            raise ValueError(
                f"max_token_staleness = {self.max_token_staleness}: tokens never get older than max_staleness = "
                f"{self.max_staleness}; lower the one or raise the other"
            )
        if [step for step, _ in self.schedule] != sorted({step for step, _ in self.schedule} - {0}):
            raise ValueError("schedule: steps must count up, from 1")
        if any(not 0 <= groups <= MAX_BATCH_GROUPS for _, groups in self.schedule):
            raise ValueError(f"schedule: a batch holds 0 to {MAX_BATCH_GROUPS} groups of a task")
        if not self.batch_groups and not any(groups for _, groups in self.schedule):
            raise ValueError("batch_groups = 0: no batch ever takes a group of this task; leave it out")
        return self


_COMPARING = frozenset({"exact_match", "last_number", "math"})
"""Built-in judges that are of no use without an answer."""
_WITHOUT_REWARDS = frozenset({"single_turn", "tools"})
"""Built-in agent loops whose samples earn nothing on the way."""


class TaskSettings(TaskRules):
    """One task of `rollq.toml`: its prompts, its judge, its sampling, and the rules above."""

    prompts: Path = Field(description="JSONL, .parquet or .arrow file, or a folder of Dataset.save_to_disk")
    prompt_field: str = Field(default="prompt", min_length=1, description="column, or a.path of nested ones")
    answer_field: str = "answer"
    ids_field: str = Field(default="prompt_ids", description="token ids that win over the text, where there are some")
    metadata_fields: tuple[str, ...] | None = Field(default=None, description="default: all other columns")
    chat: bool = Field(default=False, description="a text is a user's message, for the model's chat template")
    system_prompt: str = Field(default="", description="first message of all that do not have one of their own")
    on_bad_prompt: Literal["skip", "fail"] = "skip"
    shuffle_seed: int = 0
    prompt_order: str = Field(default="shuffle", description="shuffle, curriculum, or a dotted path of your own")
    curriculum_low: float = Field(default=0.1, ge=0, le=1, description="lowest pass rate that is trained")
    curriculum_high: float = Field(default=0.9, ge=0, le=1, description="highest pass rate that is trained")
    curriculum_tries: int = Field(default=1, gt=0, description="tries before a prompt's pass rate counts")
    curriculum_retry_passes: int = Field(default=5, ge=0, description="passes between chances for the others; 0: none")
    judge: str = Field(default="exact_match", description="name of a built-in judge, or a dotted path of your own")
    judge_options: dict[str, Any] = Field(default_factory=dict, description="of a built-in judge")
    scorers: tuple[str, ...] = Field(
        default=(), description="pools of [worker.pools] whose logprobs of every token travel with a sample"
    )
    isolate_judge: bool = Field(default=False, description="a judge of your own runs in a process, not in a thread")
    agent_loop: str = Field(default="single_turn", description="name of a built-in loop, or a dotted path of your own")
    agent_options: dict[str, Any] = Field(default_factory=dict, description="of the agent loop; it checks them")
    weight: float = Field(default=1.0, ge=0, description="share of [batch] groups")
    min_keep_rate: float = Field(
        default=0.0, ge=0, le=1, description="production stops when less of keep_window groups is worth training"
    )
    should_continue: str | None = Field(default=None, description="dotted path of a hook that may end production")
    max_prompt_tokens: int = Field(default=4096, gt=0)
    max_tokens: int = Field(default=1024, gt=0, description="new tokens of one sample")
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    filters: tuple[str, ...] = Field(
        default=(),
        description="names of built-in filters, or dotted paths: finished groups that one refuses are dropped",
    )
    overlong_filter: bool = Field(default=False, description="leave samples that max_tokens ended out of the loss")
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="the last tokens before max_tokens, which cost a growing part of overlong_penalty"
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="taken off the reward of a sample of max_tokens")

    @model_validator(mode="before")
    @classmethod
    def _orders_need_statistics(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("prompt_order", "shuffle") != "shuffle":
            return {"prompt_stats": True, **data}
        return data

    @model_validator(mode="after")
    def _order_makes_sense(self) -> Self:
        if self.prompt_order == "curriculum" and not self.prompt_stats:
            raise ValueError('prompt_order = "curriculum" goes by statistics of every prompt: leave prompt_stats out')
        if self.curriculum_low > self.curriculum_high:
            raise ValueError(
                f"curriculum_low = {self.curriculum_low} exceeds curriculum_high = {self.curriculum_high}: "
                "no prompt can be between them"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_used_again(self) -> Self:
        if self.max_uses > 1 and self.reuse_cooldown_steps + 1 >= self.stale_threshold:
            raise ValueError(
                f"max_uses = {self.max_uses}: {self.reuse_cooldown_steps + 1} train steps after its first use every "
                "group is too old; raise max_staleness, lower reuse_cooldown_steps or leave max_uses out"
            )
        return self

    @model_validator(mode="after")
    def _answers_can_be_judged(self) -> Self:
        if not self.answer_field and self.judge in _COMPARING:
            raise ValueError(
                f'judge = "{self.judge}" compares with the answer of each prompt, and answer_field = "" says there '
                "are none; name the column, or another judge"
            )
        if self.judge == "environment" and self.agent_loop in _WITHOUT_REWARDS:
            raise ValueError(
                f'judge = "environment" adds up what an environment gave, and agent_loop = "{self.agent_loop}" has '
                'none; set agent_loop = "environment", or another judge'
            )
        return self

    @model_validator(mode="after")
    def _answers_can_be_trained(self) -> Self:
        if self.overlong_buffer_tokens > self.max_tokens:
            raise ValueError(
                f"overlong_buffer_tokens = {self.overlong_buffer_tokens}: the buffer lies before the limit, "
                f"max_tokens = {self.max_tokens}; it cannot be larger"
            )
        if "zero_advantage" in self.filters and self.group_size == 1:
            raise ValueError(
                "filters: zero_advantage refuses groups whose rewards are all the same, which one sample's always are; "
                "raise group_size or leave the filter out"
            )
        return self


class EvaluationSettings(TaskSettings):
    """One evaluation of `rollq.toml`: prompts that are asked again and again, and never trained on."""

    kind: Literal["train", "eval"] = "eval"
    batch_groups: int = Field(default=1, gt=0, description="no meaning here")

    @model_validator(mode="after")
    def _is_not_trained(self) -> Self:
        if self.kind != "eval":
            raise ValueError(f"kind = {self.kind!r}: what is trained stands in [tasks.<name>]; leave this out")
        senseless = sorted(self.model_fields_set & _TRAINING_ONLY)
        if senseless:
            raise ValueError(f"{', '.join(senseless)}: an evaluation is never trained, leave this out")
        return self


_TRAINING_ONLY = {
    "batch_groups", "schedule", "weight", "max_staleness", "sync_weights_interval", "order", "expiry", "resume",
    "tail_batch_trigger_size", "tail_batch_max_tries", "stragglers", "max_token_staleness", "max_uses",
    "reuse_cooldown_steps", "partial_rollout", "min_valid_samples", "keep_window", "min_keep_rate", "should_continue",
    "max_uncheckpointed_steps", "prompt_order", "curriculum_low", "curriculum_high", "curriculum_tries",
    "curriculum_retry_passes", "prompt_stats", "pass_reward", "filters", "overlong_filter", "overlong_buffer_tokens",
    "overlong_penalty", "scorers",
}  # fmt: skip
