"""`rollq.toml`: the settings of every role in one file, the same file for every role. See examples/rollq.toml.

The roles' parts of a task are composed here, and rules that involve several sections are checked here; nothing below
knows more than its own part. `rollq.cli.settings.file` reads the file.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from rollq.buffer.common.user_functions import inside
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.rules.names import check_name
from rollq.buffer.rules.settings import ArchiveSettings, GroupRules, PayloadSettings, RedisSettings, Settings, TaskRules
from rollq.buffer.rules.shards import MAX_SHARDS, SHARED, check_task_name, shard_names, split_rules
from rollq.buffer.store.redis_url import check_url
from rollq.cli.settings.shared_batch import BatchSettings, share_batch
from rollq.cli.settings.task_tables import place_of
from rollq.consumer.settings import TrainerSettings
from rollq.environments.expansion import Environment
from rollq.monitor.changes.settings import MonitorSettings
from rollq.producer.settings import ProducerSettings, ProducerTask, PromptSettings
from rollq.workers.engines.limits import UNSUPPORTED
from rollq.workers.groups.task_settings import RolloutSettings, WorkerTask
from rollq.workers.judging.task_judge import RowReader, row_reader
from rollq.workers.settings import WorkerSettings


class JudgedPrompts(PromptSettings, RolloutSettings):
    """Prompts, and how their samples are made and judged: the keys that tasks and evaluations share."""

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
                f'{named} compares with the answer of each prompt, but answer_field = "" says that there are none; '
                "name the column, or choose another judge"
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
        if self.reply_prefix and self.agent_loop != "single_turn" and "." not in self.agent_loop:
            raise ValueError(
                f'reply_prefix: starts the one reply of agent_loop = "single_turn", and "{self.agent_loop}" has more '
                "than one; leave it out"
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
"""Profile -> the keys that it sets unless they are given. docs/guide/staleness.md gives the cost of each."""
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
            raise ValueError(
                f"{', '.join(map(place_of, keys))}: a task with offline = true is never sampled, so leave this out"
            )
        if data.get("shards", 1) != 1:
            raise ValueError("shards: a task with offline = true has one shard, so leave this out")
        return {"prompts": Path(os.devnull), **data}

    def as_shards(self, name: str) -> dict[str, Self]:
        """This task as the buffer keeps it: the shards share its batches, and its bounds on numbers of groups."""
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
            raise ValueError(f"{', '.join(map(place_of, keys))}: an evaluation is never trained, so leave this out")
        return data

    def as_task(self) -> WorkerTask:
        """This evaluation as the buffer and the workers see it: a task whose groups are evaluated."""
        fields = {name: value for name, value in self if name in WorkerTask.model_fields}
        return WorkerTask(batch_groups=1, **fields)


TASK_KEYS = set(TaskSettings.model_fields)

RunName = Annotated[str, AfterValidator(lambda name: check_name("run", name))]
TaskName = Annotated[str, AfterValidator(check_task_name)]


class RollqSettings(Settings):
    """The whole of `rollq.toml`."""

    run: RunName = Field(description="name of the run; part of every key in Redis")
    seed: int = Field(default=0, description="seed of the prompts' order, of sampling and of the trainer")
    redis: RedisSettings = Field(default=RedisSettings(), description="servers of the run")
    payloads: PayloadSettings = Field(
        default=PayloadSettings(), description="where large frames of groups are kept, if not on the servers"
    )
    archive: ArchiveSettings = Field(
        default=ArchiveSettings(), description="where `rollq archive` keeps what is trained or dropped"
    )
    tasks: dict[TaskName, TaskSettings] = Field(min_length=1, description="tasks to train, by name")
    batch: BatchSettings | None = Field(default=None, description="one batch for all tasks, shared by their weights")
    evaluations: dict[TaskName, EvaluationSettings] = Field(default={}, description="evaluations, by name")
    producer: ProducerSettings = Field(default=ProducerSettings(), description="settings of `rollq produce`")
    worker: WorkerSettings = Field(default=WorkerSettings(), description="settings of `rollq work`")
    monitor: MonitorSettings = Field(default=MonitorSettings(), description="command to call when the state changes")
    trainer: TrainerSettings | None = Field(
        default=None, description="settings of `rollq train`; left out with a custom trainer"
    )

    _environments: Mapping[tuple[str, str], Environment] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _share_batch(cls, data: Any) -> Any:
        return share_batch(_with_archive(data))

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problem = next((problem for rule in RULES for problem in rule(self)), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    def train_tasks(self) -> dict[str, TaskSettings]:
        """The tasks to train as the buffer keeps them: each of their shards is one."""
        return {shard: part for name, task in self.tasks.items() for shard, part in task.as_shards(name).items()}

    def produced_tasks(self) -> dict[str, TaskSettings]:
        """The tasks to train that producers feed: those that are not offline."""
        return {name: task for name, task in self.train_tasks().items() if not task.offline}

    def served_tasks(self) -> dict[str, WorkerTask]:
        """Everything that workers serve: all tasks that the buffer has, except offline ones."""
        return {name: task for name, task in self.all_tasks().items() if not task.offline}

    @property
    def environments(self) -> Mapping[tuple[str, str], Environment]:
        """The environments by table, `tasks` or `evaluations`, and by name, if the settings were read from a file."""
        return self._environments

    def with_environments(self, environments: Mapping[tuple[str, str], Environment]) -> Self:
        """These settings with the environments of their file."""
        settings = self.model_copy()
        settings._environments = environments
        return settings

    def row_readers(self) -> dict[str, RowReader]:
        """Task or evaluation -> reader of what its judge, or each row's own, compares with. Raises `ConfigError` for
        options that a judge does not take."""
        readers: dict[str, RowReader] = {}
        tables: dict[str, Mapping[str, JudgedPrompts]] = {"tasks": self.tasks, "evaluations": self.evaluations}
        for root, judged in tables.items():
            for name, table in judged.items():
                with inside(f"{root}.{name}"):
                    readers[name] = row_reader(table.judge, table.judge_options)
        return readers

    def all_tasks(self) -> dict[str, WorkerTask]:
        """Everything that the buffer registers: tasks by shard, and evaluations as tasks."""
        return {**self.train_tasks(), **{name: evaluation.as_task() for name, evaluation in self.evaluations.items()}}


def _with_archive(data: Any) -> Any:
    """The content of `rollq.toml`, in which all tasks and evaluations are archived if `[archive]` has a place."""
    if not isinstance(data, dict) or not isinstance(data.get("archive"), dict) or not data["archive"].get("url"):
        return data
    roots = {name: data[name] for name in ("tasks", "evaluations") if isinstance(data.get(name), dict)}
    filled = {
        name: {key: {**table, "archive": True} if isinstance(table, dict) else table for key, table in tables.items()}
        for name, tables in roots.items()
    }
    return {**data, **filled}


def _names_differ(settings: RollqSettings) -> Iterator[str]:
    for name in sorted(set(settings.tasks) & set(settings.evaluations)):
        yield f"{name!r} is a task and an evaluation: give them different names"


def _batches_fill_despite_cooldown(settings: RollqSettings) -> Iterator[str]:
    for name, task in settings.tasks.items():
        replaced = settings.producer.strategy == "sync" and not task.offline
        if replaced and task.max_uses > 1 and task.reuse_cooldown_steps:
            yield (
                f"tasks.{name}.{place_of('reuse_cooldown_steps')}: producer.strategy = 'sync' makes no replacement for "
                "groups that cool down, so batches would never fill; use 'async', or no cooldown"
            )


def _priorities_have_draws(settings: RollqSettings) -> Iterator[str]:
    trainer, orders = settings.trainer, {task.order for task in settings.tasks.values()}
    if trainer is None or "priority" in orders:
        return
    given = {"priorities": trainer.priorities, "advantages.draw_correction": trainer.advantages.draw_correction}
    for key in (key for key, value in given.items() if value):
        yield f'trainer.{key}: needs a task with {place_of("order")} = "priority"; or leave it out'


def _batches_have_groups(settings: RollqSettings) -> Iterator[str]:
    tasks = settings.tasks.values()
    for step in sorted({1} | {step for task in tasks for step, _ in task.schedule}):
        if not any(groups_at(task.batch_groups, task.schedule, step) for task in tasks):
            yield f"tasks.*.{place_of('schedule')}: no task has a group in the batch of step {step}"


def _shards_have_groups(settings: RollqSettings) -> Iterator[str]:
    for name, task in settings.tasks.items():
        largest = max(task.batch_groups, *(groups for _, groups in task.schedule), 0)
        if task.shards > max(1, largest):
            yield (
                f"tasks.{name}.{place_of('shards')} = {task.shards}: no batch has more than {largest} of its groups; "
                "use fewer"
            )


def _urls_are_valid(settings: RollqSettings) -> Iterator[str]:
    for url in filter(None, (settings.redis.buffer_url, settings.redis.queue_url)):
        try:
            check_url(url)
        except ConfigError as error:
            yield str(error)


def _engines_and_trainer_can_take_turns(settings: RollqSettings) -> Iterator[str]:
    if settings.trainer is None or not settings.trainer.colocated:
        return
    if settings.producer.strategy != "sync":
        yield "trainer.colocated: engines and trainer take turns, which needs producer.strategy = 'sync'"
    for name, task in settings.tasks.items():
        if not task.offline and (task.max_staleness or task.sync_weights_interval > 1):
            yield (
                f"trainer.colocated: one batch is generated and trained at a time, so tasks.{name} needs "
                "max_staleness = 0 and sync_weights_interval = 1, as profile = 'on-policy' sets them"
            )


def _tasks_agree(settings: RollqSettings) -> Iterator[str]:
    for key in ("sync_weights_interval", "resume"):  # the trainer publishes and resumes for all tasks together
        values = {name: getattr(task, key) for name, task in settings.tasks.items()}
        if len(set(values.values())) > 1:
            yield f"tasks.*.{place_of(key)}: must be the same for every task of a run, not {values}"


def _evaluations_exist(settings: RollqSettings) -> Iterator[str]:
    if settings.trainer and settings.trainer.evaluate_every and not settings.evaluations:
        yield (
            f"trainer.evaluate_every = {settings.trainer.evaluate_every}: there is nothing to evaluate; add a table "
            "[evaluations.<name>], or leave this out"
        )


def _the_engine_can_sample(settings: RollqSettings) -> Iterator[str]:
    engine = settings.worker.engine
    for name, evaluation in settings.evaluations.items():
        for parameter in sorted(evaluation.sampling(None).rare().keys() & UNSUPPORTED.get(engine, frozenset())):
            yield (
                f"evaluations.{name}.{place_of(parameter)}: engine '{engine}' does not support it; leave it out, or "
                "use engine 'vllm' or 'openai'"
            )


def _checkpoints_come_in_time(settings: RollqSettings) -> Iterator[str]:
    for name, task in settings.tasks.items():
        if settings.trainer and settings.trainer.checkpoint_every > task.max_uncheckpointed_steps:
            yield (
                f"trainer.checkpoint_every = {settings.trainer.checkpoint_every}: must not exceed "
                f"tasks.{name}.{place_of('max_uncheckpointed_steps')} = {task.max_uncheckpointed_steps}"
            )


def _samples_fit_into_a_micro_batch(settings: RollqSettings) -> Iterator[str]:
    for name, task in settings.tasks.items():
        longest = task.max_prompt_tokens + task.max_tokens
        if settings.trainer and longest > settings.trainer.micro_batch_tokens:
            yield (
                f"trainer.micro_batch_tokens = {settings.trainer.micro_batch_tokens}: must hold one sample of "
                f"tasks.{name}, max_prompt_tokens + max_tokens = {longest}"
            )


def _groups_have_a_baseline(settings: RollqSettings) -> Iterator[str]:
    for name, task in settings.tasks.items():
        if settings.trainer is None or name in settings.trainer.loss.components:
            continue
        if task.group_size == 1 and settings.trainer.advantages.baseline != "batch":
            baseline = settings.trainer.advantages.baseline
            yield (
                f'tasks.{name}.group_size = 1: with trainer.advantages.baseline = "{baseline}" every advantage is 0, '
                'so nothing is trained; use groups of 2 or more, or baseline = "batch" with scale = "batch" or "none"'
            )
        elif 1 < task.group_size <= (k := settings.trainer.advantages.pass_k):
            yield (
                f"tasks.{name}.group_size = {task.group_size}: with trainer.advantages.pass_k = {k} every advantage is "
                f"0, so nothing is trained; use groups of {k + 1} or more, or a smaller pass_k"
            )


def _tasks_with_another_loss_exist(settings: RollqSettings) -> Iterator[str]:
    loss = settings.trainer.loss if settings.trainer else None
    for key, named in (("sft", loss.sft), ("distillation", loss.distillation)) if loss else ():
        for name in named:
            if name not in settings.tasks:
                yield f"trainer.loss.{key}: {name!r} is not a task; there are {', '.join(settings.tasks)}"


def _teachers_tell_enough(settings: RollqSettings) -> Iterator[str]:
    loss = settings.trainer.loss if settings.trainer else None
    teacher = settings.worker.pools.get("teacher")
    if loss is None or loss.distilled_tokens != "top_k" or teacher is None or teacher.top_k:
        return
    if any("teacher" in settings.tasks[name].scorers for name in loss.distillation if name in settings.tasks):
        yield (
            'trainer.loss.distilled_tokens = "top_k": worker.pools.teacher has top_k = 0, so it returns one logprob of '
            "each position; set top_k = 8 there, for example"
        )


RULES = (
    _names_differ,
    _batches_fill_despite_cooldown,
    _priorities_have_draws,
    _batches_have_groups,
    _shards_have_groups,
    _urls_are_valid,
    _engines_and_trainer_can_take_turns,
    _tasks_agree,
    _evaluations_exist,
    _the_engine_can_sample,
    _checkpoints_come_in_time,
    _samples_fit_into_a_micro_batch,
    _groups_have_a_baseline,
    _tasks_with_another_loss_exist,
    _teachers_tell_enough,
)
"""Rules that involve several sections; each yields one sentence per violation, and the first one is reported."""
