"""`rollq.toml`: every role's settings in one file, the same for all roles. See examples/rollq.toml. Rules that involve
several sections are checked here; each section's model checks only its own part. `rollq.cli.settings.file` reads the
file.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from rollq.buffer.common.user_functions import inside
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.rules.names import check_name
from rollq.buffer.rules.settings import ArchiveSettings, PayloadSettings, RedisSettings, Settings
from rollq.buffer.rules.shards import check_task_name
from rollq.buffer.store.redis_url import check_url
from rollq.cli.settings.shared_batch import BatchSettings, share_batch
from rollq.cli.settings.task_settings import EvaluationSettings, JudgedPrompts, TaskSettings
from rollq.cli.settings.task_tables import place_of
from rollq.consumer.settings import TrainerSettings
from rollq.environments.expansion import Environment
from rollq.monitor.changes.settings import MonitorSettings
from rollq.producer.settings import ProducerSettings
from rollq.workers.engines.limits import UNSUPPORTED
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.task_judge import RowReader, row_reader
from rollq.workers.settings import WorkerSettings

RunName = Annotated[str, AfterValidator(lambda name: check_name("run", name))]
TaskName = Annotated[str, AfterValidator(check_task_name)]


class RollqSettings(Settings):
    """The whole of `rollq.toml`."""

    run: RunName = Field(description="name of the run; part of every key in Redis")
    seed: int = Field(default=0, ge=0, description="seed of the prompts' order, of sampling and of the trainer")
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
        """The tasks to train, in the buffer's form, where each shard is a task."""
        return {shard: part for name, task in self.tasks.items() for shard, part in task.as_shards(name).items()}

    def produced_tasks(self) -> dict[str, TaskSettings]:
        """The tasks to train that producers feed: all except offline tasks."""
        return {name: task for name, task in self.train_tasks().items() if not task.offline}

    def served_tasks(self) -> dict[str, WorkerTask]:
        """All tasks that workers serve: the buffer's tasks, except offline tasks."""
        return {name: task for name, task in self.all_tasks().items() if not task.offline}

    @property
    def environments(self) -> Mapping[tuple[str, str], Environment]:
        """The environments by table, `tasks` or `evaluations`, and by name, if the settings were read from a file."""
        return self._environments

    def with_environments(self, environments: Mapping[tuple[str, str], Environment]) -> Self:
        """These settings with their file's environments."""
        settings = self.model_copy()
        settings._environments = environments
        return settings

    def row_readers(self) -> dict[str, RowReader]:
        """Task or evaluation -> a reader for the answers with which its judges compare. Raises `ConfigError` for
        options that a judge does not take."""
        readers: dict[str, RowReader] = {}
        tables: dict[str, Mapping[str, JudgedPrompts]] = {"tasks": self.tasks, "evaluations": self.evaluations}
        for root, judged in tables.items():
            for name, table in judged.items():
                with inside(f"{root}.{name}"):
                    readers[name] = row_reader(table.judge, table.judge_options)
        return readers

    def all_tasks(self) -> dict[str, WorkerTask]:
        """All tasks that the buffer registers: tasks by shard, and evaluations as tasks."""
        return {**self.train_tasks(), **{name: evaluation.as_task() for name, evaluation in self.evaluations.items()}}


def _with_archive(data: Any) -> Any:
    """The content of `rollq.toml`, with all tasks and evaluations archived if `[archive]` has a place."""
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
                yield f"trainer.loss.{key}: {name!r} is not a task; the tasks are {', '.join(settings.tasks)}"


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
"""Rules that involve several sections. Each yields one sentence per violation, and the first violation is reported."""
