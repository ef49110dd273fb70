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

from rollq.buffer.connection import check_url
from rollq.buffer.errors import ConfigError
from rollq.buffer.keys import check_name
from rollq.buffer.settings import RedisSettings, Settings, TaskSettings
from rollq.cli.explain import bent_values, explain
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


class RollqSettings(Settings):
    """The whole of `rollq.toml`."""

    run: Annotated[str, AfterValidator(_run_name)] = Field(description="name of the run; a namespace in Redis")
    seed: int = Field(default=0, description="of everything that is drawn at random")
    redis: RedisSettings = RedisSettings()
    tasks: dict[Annotated[str, AfterValidator(_task_name)], TaskSettings] = Field(min_length=1)
    producer: ProducerSettings = ProducerSettings()
    worker: WorkerSettings = WorkerSettings()
    trainer: TrainerSettings | None = Field(default=None, description="of `rollq train`; not for a trainer of your own")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for url in (self.redis.buffer_url, self.redis.queue_url or self.redis.buffer_url):
            check_url(url)
        for name, task in self.tasks.items():
            if task.min_valid_samples is not None and task.min_valid_samples > task.group_size:
                raise ValueError(
                    f"tasks.{name}.min_valid_samples = {task.min_valid_samples}: must not exceed group_size = "
                    f"{task.group_size}"
                )
        for key in ("sync_weights_interval", "resume"):  # the trainer publishes and resumes for all tasks together
            values = {name: getattr(task, key) for name, task in self.tasks.items()}
            if len(set(values.values())) > 1:
                raise ValueError(f"tasks.*.{key}: must be the same for every task of a run, not {values}")
        if self.trainer:
            self._trainer_fits(self.trainer)
        return self

    def _trainer_fits(self, trainer: TrainerSettings) -> None:
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
