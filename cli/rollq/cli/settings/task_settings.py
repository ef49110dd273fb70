"""The tables of tasks and evaluations in `rollq.toml`, composed of the roles' parts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from rollq.buffer.rules.settings import GroupRules, TaskRules
from rollq.buffer.rules.shards import MAX_SHARDS, SHARED, shard_names, split_rules
from rollq.cli.settings.task_tables import place_of
from rollq.producer.settings import ProducerTask, PromptSettings
from rollq.workers.groups.task_settings import RolloutSettings, WorkerTask
from rollq.workers.judging.task_judge import row_reader


class JudgedPrompts(PromptSettings, RolloutSettings):
    """Prompts, and the generation and judging of their samples: the keys that tasks and evaluations share."""

    env: str | None = Field(
        default=None, description='an environment, as in "reasoning-gym:chain_sum": sets prompts, judge and agent loop'
    )
    env_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the environment; rows: how many it makes"
    )
    env_split: str = Field(default="", description="rows of the environment; default: train, of an evaluation test")
    env_shared: bool = Field(default=False, description="whether the task may have rows of an evaluation")

    @model_validator(mode="after")
    def _answers_can_be_judged(self) -> Self:
        is_judged = not getattr(self, "offline", False)
        if is_judged and not self.answer_field and (key := row_reader(self.judge, self.judge_options).comparing):
            named = f'judge = "{self.judge}"' if isinstance(self.judge, str) else key
            raise ValueError(
                f'{named} compares with the answer of each prompt, but rows.answer_field = "" says that there are '
                "none; name the column, or choose another judge"
            )
        return self

    @model_validator(mode="after")
    def _judges_see_the_column(self) -> Self:
        column = self.judge.get("field") if isinstance(self.judge, dict) else None
        kept = self.metadata_fields
        if column and kept is not None and not any(column == name or column.startswith(f"{name}.") for name in kept):
            raise ValueError(
                f'judge.field = "{column}": rows.metadata_fields leaves this column out; add it, or leave '
                "metadata_fields out"
            )
        return self

    @model_validator(mode="after")
    def _one_reply_is_started(self) -> Self:
        is_single = self.agent_loop == "single_turn" or "." in self.agent_loop
        if self.tools_field and not is_single:
            raise ValueError(
                f'rows.tools_field: is for agent_loop = "single_turn", and "{self.agent_loop}" gives the model tools '
                "of its environment; leave it out"
            )
        if self.reply_prefix and not is_single:
            raise ValueError(
                f'rows.reply_prefix: starts the one reply of agent_loop = "single_turn", and "{self.agent_loop}" has '
                "more than one; leave it out"
            )
        return self


Profile = Literal["on-policy", "one-step-off", "throughput"]
PROFILES: Final[Mapping[object, Mapping[str, Any]]] = {
    "on-policy": {
        "max_staleness": 0, "sync_weights_interval": 1, "max_token_staleness": None, "stragglers": "wait",
        "expiry": "member", "tail_batch_trigger_size": 0, "partial_rollout": False,
    },
    "one-step-off": {
        "max_staleness": 1, "sync_weights_interval": 1, "max_token_staleness": None, "stragglers": "wait",
        "expiry": "member", "tail_batch_trigger_size": 0, "partial_rollout": False,
    },
    "throughput": {
        "max_staleness": 4, "sync_weights_interval": 1, "max_token_staleness": None, "stragglers": "expire",
        "expiry": "member", "tail_batch_trigger_size": 0, "partial_rollout": True,
    },
}  # fmt: skip
"""Profile -> the keys that it sets unless they are given. docs/guide/staleness.md gives each profile's cost."""
OFFLINE_KEYS = frozenset(TaskRules.model_fields) | {
    "prompt_field", "answer_field", "ids_field", "metadata_fields", "chat", "template_options", "system_prompt",
    "system_prompt_field", "max_prompt_tokens", "max_tokens", "shards",
}  # fmt: skip
"""Keys of an offline task: its rules, and how `rollq import` reads rows."""


class TaskSettings(ProducerTask, WorkerTask, JudgedPrompts):
    """One task: a table `[tasks.<name>]`. An offline task has no `prompts`."""

    profile: Profile = Field(
        default="one-step-off",
        description="how old samples may become: sets max_staleness and the missing keys of .staleness",
    )
    shards: int = Field(
        default=1,
        gt=0,
        le=MAX_SHARDS,
        description="number of parts in which the buffer keeps this task, to use several primaries",
    )

    @model_validator(mode="before")
    @classmethod
    def _profile_sets_staleness(cls, data: Any) -> Any:
        profile = data.get("profile") if isinstance(data, dict) else None
        return {**PROFILES[profile], **data} if isinstance(profile, str) and profile in PROFILES else data

    @model_validator(mode="before")
    @classmethod
    def _offline_tasks_are_not_sampled(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("offline") is not True:
            return data
        if keys := sorted((set(data) & set(cls.model_fields)) - OFFLINE_KEYS):
            raise ValueError(_refused(keys, "a task with offline = true is never sampled"))
        if data.get("shards", 1) != 1:
            raise ValueError("shards: a task with offline = true has one shard, so leave this out")
        return {"prompts": Path(os.devnull), **data}

    def as_shards(self, name: str) -> dict[str, Self]:
        """This task in the buffer's form: its shards share its batches, and its bounds on numbers of groups."""
        parts = split_rules({rule: getattr(self, rule) for rule in SHARED}, self.shards)
        return {
            shard: self.model_copy(update=part)
            for shard, part in zip(shard_names(name, self.shards), parts, strict=True)
        }


class EvaluationSettings(GroupRules, JudgedPrompts):
    """One evaluation: a table `[evaluations.<name>]`. Its prompts are sampled whenever the trainer evaluates."""

    kind: Literal["eval"] = Field(default="eval", description="groups of an evaluation are never trained")

    @model_validator(mode="before")
    @classmethod
    def _is_not_trained(cls, data: Any) -> Any:
        if isinstance(data, dict) and (keys := sorted(set(data) & (TASK_KEYS - set(cls.model_fields)))):
            raise ValueError(_refused(keys, "an evaluation is never trained"))
        return data

    def as_task(self) -> WorkerTask:
        """This evaluation in the form for the buffer and the workers: a task whose groups are evaluated."""
        fields = {name: value for name, value in self if name in WorkerTask.model_fields}
        return WorkerTask(batch_groups=1, **fields)


def _refused(keys: Sequence[str], reason: str) -> str:
    """The message about keys that have no effect."""
    return f"{', '.join(map(place_of, keys))}: {reason}, so leave {'this' if len(keys) == 1 else 'these'} out"


TASK_KEYS = set(TaskSettings.model_fields)
