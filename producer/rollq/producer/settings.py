"""Settings of the producer: section `[producer]` of `rollq.toml`, and the producer's part of a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from rollq.buffer.common.counting import count
from rollq.buffer.rules.settings import PromptLength, Settings, TaskRules
from rollq.buffer.settings_errors import explanation


class ProducerSettings(Settings):
    """How far ahead of the trainer prompts are scheduled, and in what portions."""

    strategy: Literal["sync", "async"] = Field(
        default="async", description="sync: only groups for the live weights; async: as far ahead as staleness allows"
    )
    over_sample: float = Field(
        default=0.0, ge=0, description="async only: groups scheduled beyond the bound, as a fraction of a batch"
    )
    adaptive_over_sample: bool = Field(
        default=False, description="async only: schedule more when many groups are filtered or fail, up to 3 batches"
    )
    groups_per_job: int = Field(default=1, gt=0, le=1000, description="groups that one RQ ticket may take")

    REMOVED: ClassVar[Mapping[str, str]] = {"tick_s": "the buffer is read at least once a second; leave it out"}

    @model_validator(mode="after")
    def _sync_has_no_surplus(self) -> Self:
        if self.strategy == "sync" and (self.over_sample > 0 or self.adaptive_over_sample):
            name = "over_sample" if self.over_sample > 0 else "adaptive_over_sample"
            raise ValueError(f"{name} needs strategy = 'async': sync schedules exactly one batch")
        return self


class PromptSettings(PromptLength):
    """The prompts of a task or of an evaluation, and the reading of their rows."""

    prompts: Path = Field(
        description="prompts: a JSONL, .parquet or .arrow file, or a folder written by Dataset.save_to_disk"
    )
    prompt_field: str = Field(
        default="prompt", min_length=1, description="column with the prompt; dots separate nested columns"
    )
    answer_field: str = Field(default="answer", description='column with the reference answer; "": there is none')
    ids_field: str = Field(
        default="prompt_ids", description="column with token ids, which take precedence over the text; may be absent"
    )
    images_field: str = Field(
        default="images", min_length=1, description="column with the images of the prompt; may be absent"
    )
    image_folders: tuple[Path, ...] = Field(
        default=(), description="folders with images that rows may name, in addition to the folder of prompts"
    )
    image_options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the model's image processor, such as its size limits"
    )
    metadata_fields: tuple[str, ...] | None = Field(
        default=None, description="columns passed to judges and agent loops; default: all other columns"
    )
    chat: bool = Field(
        default=False, description="treat a string as a user message, and apply the model's chat template"
    )
    final_answer: Literal["refuse", "answer", "continue"] = Field(
        default="refuse",
        description="messages that end with the assistant's: refuse the row, take it as the answer, or continue it",
    )
    system_prompt: str = Field(default="", description="system message for prompts that have none; empty: no message")
    system_prompt_field: str = Field(
        default="", description="column with a row's own system prompt, instead of system_prompt; default: none"
    )
    tools_field: str = Field(
        default="",
        description="column with definitions of tools for the chat template; only in single_turn; default: none",
    )
    reply_prefix: str = Field(
        default="", description="start of the assistant's reply, which the model continues; only in single_turn"
    )
    max_bad_rows: float = Field(
        default=0.05, ge=0, le=1, description="share of the rows that may be unusable; they are left out and counted"
    )
    on_prompts_changed: Literal["fail", "continue"] = Field(
        default="fail",
        description="if the file or the seeds have changed since the run began: refuse to start, or continue",
    )


class ByColumn(Settings):
    """An order of prompts by the numbers in a column, the same in every pass."""

    by: str = Field(min_length=1, description="column with a number for each prompt; dots separate nested columns")
    ascending: bool = Field(default=True, description="whether the lowest number comes first")


ORDERS_WITH_STATISTICS = frozenset({"curriculum", "difficulty"})


class ProducerTask(TaskRules, PromptSettings):
    """Everything that a producer needs to know about a task."""

    prompt_order: str | ByColumn = Field(
        default="shuffle",
        description="order of the prompts: shuffle, file, random, difficulty, curriculum, the dotted path of a custom "
        'order, or by a column: { by = "level", ascending = true }',
    )
    passes: int | None = Field(
        default=None, gt=0, description="passes over the prompts after which production ends; default: no limit"
    )
    curriculum_low: float = Field(default=0.1, ge=0, le=1, description="lowest pass rate that the curriculum trains")
    curriculum_high: float = Field(default=0.9, ge=0, le=1, description="highest pass rate that the curriculum trains")
    min_keep_rate: float = Field(
        default=0.0, ge=0, le=1, description="production stops when a smaller fraction of the last 256 groups is kept"
    )
    stop_after_failures: int = Field(
        default=64, ge=0, description="production stops when this many groups have failed in a row; 0: never"
    )
    should_continue: str | None = Field(
        default=None, description="dotted path of a custom hook that may end production; default: none"
    )

    @field_validator("prompt_order", mode="before")
    @classmethod
    def _order_is_a_name_or_a_column(cls, value: Any) -> Any:
        """Validate the written form, so errors concern only it."""
        if isinstance(value, str | ByColumn):
            return value
        if not isinstance(value, dict):
            raise ValueError('must be a string in quotes, or a table such as { by = "level" }')
        try:
            return ByColumn.model_validate(value)
        except ValidationError as error:
            raise ValueError(explanation(error, ByColumn)) from None

    @model_validator(mode="before")
    @classmethod
    def _orders_need_statistics(cls, data: Any) -> Any:
        order = data.get("prompt_order") if isinstance(data, dict) else None
        keeps = isinstance(order, str) and (order in ORDERS_WITH_STATISTICS or "." in order)
        return {"prompt_stats": True, **data} if keeps else data

    @model_validator(mode="after")
    def _order_is_possible(self) -> Self:
        if self.prompt_order in ORDERS_WITH_STATISTICS and not self.prompt_stats:
            raise ValueError(
                f'prompt_order = "{self.prompt_order}" relies on statistics of every prompt: leave prompt_stats out'
            )
        if self.curriculum_low > self.curriculum_high:
            raise ValueError(
                f"curriculum.low = {self.curriculum_low} exceeds curriculum.high = {self.curriculum_high}: "
                "no pass rate lies between them"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_used_again(self) -> Self:
        if not self.offline and self.max_uses > 1 and self.reuse_cooldown_steps + 1 >= self.stale_threshold:
            raise ValueError(
                f"max_uses = {self.max_uses}: {count(self.reuse_cooldown_steps + 1, 'train step')} after its first "
                "use, every group is too old; raise max_staleness, lower reuse_cooldown_steps or leave max_uses out"
            )
        return self
