"""`rollq.toml`: every role's settings in one file, the same file for every role. See examples/rollq.toml.

Paths in it are relative to the file. Secrets and URLs may come from the environment instead, which wins:
`ROLLQ_RUN`, `ROLLQ_REDIS_URL`, `ROLLQ_QUEUE_URL`, `ROLLQ_REDIS_PASSWORD`, or `ROLLQ_REDIS_PASSWORD_FILE` that names a
file holding the password.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from rollq.buffer.batch_sizes import groups_at, split
from rollq.buffer.errors import ConfigError
from rollq.buffer.settings import MAX_BATCH_GROUPS, EvaluationSettings, RedisSettings, Settings, TaskSettings
from rollq.buffer.store.connection import check_url
from rollq.buffer.store.keys import check_name
from rollq.cli.settings_errors import bent_values, explain
from rollq.consumer.settings import TrainerSettings
from rollq.producer.settings import ProducerSettings
from rollq.workers.settings import WorkerSettings

ENVIRONMENT = {
    "ROLLQ_RUN": "run",
    "ROLLQ_REDIS_URL": "redis.buffer_url",
    "ROLLQ_QUEUE_URL": "redis.queue_url",
    "ROLLQ_REDIS_PASSWORD": "redis.password",
}
"""Environment variable -> key that it overrides."""

PASSWORD_FILE = "ROLLQ_REDIS_PASSWORD_FILE"

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def _run_name(name: str) -> str:
    return check_name("run", name)


def _task_name(name: str) -> str:
    return check_name("task", name)


class BatchStep(Settings):
    """From train step `step` on, batches take `groups`, shared by `weights`; what is left out stays as it was."""

    step: int = Field(gt=1)
    groups: int | None = Field(default=None, gt=0, le=MAX_BATCH_GROUPS)
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None


class BatchSettings(Settings):
    """The batch of all tasks together: `[batch]`. Tasks share it by their `weight`."""

    groups: int = Field(gt=0, le=MAX_BATCH_GROUPS)
    schedule: tuple[BatchStep, ...] = ()


class RollqSettings(Settings):
    """The whole of `rollq.toml`."""

    run: Annotated[str, AfterValidator(_run_name)] = Field(description="name of the run; a namespace in Redis")
    seed: int = Field(default=0, description="of everything that is drawn at random")
    redis: RedisSettings = RedisSettings()
    tasks: dict[Annotated[str, AfterValidator(_task_name)], TaskSettings] = Field(min_length=1)
    batch: BatchSettings | None = Field(default=None, description="one batch for all tasks, shared by weight")
    evaluations: dict[Annotated[str, AfterValidator(_task_name)], EvaluationSettings] = Field(default={})
    producer: ProducerSettings = ProducerSettings()
    worker: WorkerSettings = WorkerSettings()
    trainer: TrainerSettings | None = Field(default=None, description="of `rollq train`; not for a trainer of your own")

    @model_validator(mode="before")
    @classmethod
    def _share_batch(cls, data: Any) -> Any:
        """With `[batch]`, the tasks' sizes follow from it."""
        if not isinstance(data, dict) or "batch" not in data or not isinstance(data.get("tasks"), dict):
            return data
        tasks = {name: dict(task) for name, task in data["tasks"].items() if isinstance(task, dict)}
        try:
            batch = BatchSettings.model_validate(data["batch"])
        except ValidationError:  # told with its place when the field itself is validated
            return {**data, "tasks": {name: {"batch_groups": 1, **task} for name, task in tasks.items()}}
        for name, task in tasks.items():
            for key in ("batch_groups", "schedule"):
                if key in task:
                    raise ValueError(f"tasks.{name}.{key}: [batch] says how large batches are; leave one of them out")
        for name, (groups, schedule) in batch_sizes(batch, tasks).items():
            tasks[name] |= {"batch_groups": groups, "schedule": schedule}
        return {**data, "tasks": data["tasks"] | tasks}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if twice := sorted(set(self.tasks) & set(self.evaluations)):
            raise ValueError(f"{twice[0]!r} is a task and an evaluation: give them different names")
        for name, task in self.tasks.items():
            if task.kind != "train":
                raise ValueError(f"tasks.{name}.kind: what is evaluated stands in [evaluations.{name}]")
            if self.producer.strategy == "sync" and task.max_uses > 1 and task.reuse_cooldown_steps:
                raise ValueError(
                    f"tasks.{name}.reuse_cooldown_steps: producer.strategy = 'sync' makes nothing in the place of "
                    "groups that cool down, so batches would never fill; use 'async', or no cooldown"
                )
        for step in {1} | {step for task in self.tasks.values() for step, _ in task.schedule}:
            if not any(groups_at(task.batch_groups, task.schedule, step) for task in self.tasks.values()):
                raise ValueError(f"tasks.*.schedule: no task has a group in the batch of step {step}")
        for url in (self.redis.buffer_url, self.redis.queue_url or self.redis.buffer_url):
            check_url(url)
        for name, task in self.tasks.items():
            if task.min_valid_samples is not None and task.min_valid_samples > task.group_size:
                raise ValueError(
                    f"tasks.{name}.min_valid_samples = {task.min_valid_samples}: must not exceed group_size = "
                    f"{task.group_size}"
                )
        if self.trainer and self.trainer.colocated:
            self._may_be_colocated()
        for key in ("sync_weights_interval", "resume"):  # the trainer publishes and resumes for all tasks together
            values = {name: getattr(task, key) for name, task in self.tasks.items()}
            if len(set(values.values())) > 1:
                raise ValueError(f"tasks.*.{key}: must be the same for every task of a run, not {values}")
        if self.trainer:
            self._trainer_fits(self.trainer)
        return self

    def _may_be_colocated(self) -> None:
        if self.producer.strategy != "sync":
            raise ValueError(
                "trainer.colocated: engines and trainer take turns, which needs producer.strategy = 'sync'"
            )
        for name, task in self.tasks.items():
            if task.max_staleness or task.sync_weights_interval > 1:
                raise ValueError(
                    f"trainer.colocated: one batch is generated and trained at a time, so tasks.{name} needs "
                    "max_staleness = 0 and sync_weights_interval = 1"
                )

    def _trainer_fits(self, trainer: TrainerSettings) -> None:
        if trainer.evaluate_every and not self.evaluations:
            raise ValueError(
                f"trainer.evaluate_every = {trainer.evaluate_every}: there is nothing to evaluate; name its prompts in "
                "[evaluations.<name>], or leave it out"
            )
        for name, task in self.tasks.items():
            if trainer.checkpoint_every > task.max_uncheckpointed_steps:
                raise ValueError(
                    f"trainer.checkpoint_every = {trainer.checkpoint_every}: must not exceed "
                    f"tasks.{name}.max_uncheckpointed_steps = {task.max_uncheckpointed_steps}"
                )
            longest = task.max_prompt_tokens + task.max_tokens
            if longest > trainer.micro_batch_tokens:
                raise ValueError(
                    f"trainer.micro_batch_tokens = {trainer.micro_batch_tokens}: must hold one sample of "
                    f"tasks.{name}, max_prompt_tokens + max_tokens = {longest}"
                )


def batch_sizes(batch: BatchSettings, tasks: Mapping[str, Any]) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Per task, its groups in the first batch, and (step, groups) from which step on they are others.

    Raises `ValueError` for weights that are none, and for a task that never gets a group.
    """
    weights: dict[str, Any] = {name: task.get("weight", 1.0) for name, task in tasks.items()}
    if bad := [
        name for name, weight in weights.items() if isinstance(weight, bool) or not isinstance(weight, int | float)
    ]:
        raise ValueError(f"tasks.{bad[0]}.weight = {weights[bad[0]]!r}: must be a number")
    groups, shares = batch.groups, [(1, split(batch.groups, list(weights.items())))]
    for entry in sorted(batch.schedule, key=lambda entry: entry.step):
        if unknown := sorted(set(entry.weights or {}) - set(tasks)):
            raise ValueError(f"batch.schedule: step {entry.step} names task {unknown[0]!r}, which there is not")
        weights |= entry.weights or {}
        groups = groups if entry.groups is None else entry.groups
        shares.append((entry.step, split(groups, list(weights.items()))))
    for name in tasks:
        if not any(share[name] for _, share in shares):
            raise ValueError(f"tasks.{name}: gets no group of any batch: raise its weight, or leave it out")
    return {name: (shares[0][1][name], [(step, share[name]) for step, share in shares[1:]]) for name in tasks}


def load_settings(path: Path, environment: Mapping[str, str] | None = None) -> RollqSettings:
    """Read and check `rollq.toml`; paths come back absolute. `environment` defaults to that of the process.

    Raises `ConfigError` with one line per problem.
    """
    environment = os.environ if environment is None else environment
    data = _read_toml(path)
    origins = _override(data, environment)
    try:
        settings = RollqSettings.model_validate(data)
    except ValidationError as error:
        raise _refusal(path, explain(error, RollqSettings, origins)) from None
    if bent := list(bent_values(data, settings)):
        raise _refusal(path, bent)
    return anchored(settings, path.absolute().parent)


def _refusal(path: Path, problems: list[str]) -> ConfigError:
    return ConfigError("\n  ".join([f"{path}:", *problems]) if len(problems) > 1 else f"{path}: {problems[0]}")


def anchored(settings: AnySettings, folder: Path) -> AnySettings:
    """`settings` with every relative path in it made absolute, from `folder`."""
    return settings.model_copy(update={name: _anchored(value, folder) for name, value in settings})


def _anchored(value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return folder / value.expanduser()
    if isinstance(value, BaseModel):
        return anchored(value, folder)
    if isinstance(value, dict):
        return {key: _anchored(_path_option(key, item), folder) for key, item in value.items()}
    return value


def _path_option(key: str, value: Any) -> Any:
    """An engine's options are plain values until it checks them; its model is a folder."""
    return Path(value) if key == "model" and isinstance(value, str) else value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def password_from(environment: Mapping[str, str]) -> str | None:
    """The servers' password in the environment, directly or in the file that it names; None without one."""
    if environment.get("ROLLQ_REDIS_PASSWORD"):
        return environment["ROLLQ_REDIS_PASSWORD"]
    path = environment.get(PASSWORD_FILE)
    if not path:
        return None
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PASSWORD_FILE} = {path!r}: cannot be read: {error}") from error


def _override(data: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Put values of the environment into `data`. Returns key -> variable for those that were."""
    values = {key: environment.get(name) for name, key in ENVIRONMENT.items()}
    values["redis.password"] = password_from(environment)
    for path, value in values.items():
        if value:
            section, _, key = path.rpartition(".")
            owner = data.setdefault(section, {}) if section else data
            if isinstance(owner, dict):
                owner[key] = value
    return {key: name for name, key in ENVIRONMENT.items() if values[key]}
