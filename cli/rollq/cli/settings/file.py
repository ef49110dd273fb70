"""Reads `rollq.toml`, with overrides from the environment.

Paths in the file are relative to its folder. Secrets and URLs may come from the environment instead, which takes
precedence: `ROLLQ_RUN`, `ROLLQ_REDIS_URL`, `ROLLQ_QUEUE_URL`, `ROLLQ_REDIS_USER`, `ROLLQ_REDIS_PASSWORD`, or
`ROLLQ_REDIS_PASSWORD_FILE`, which names a file with the password; and for TLS `ROLLQ_REDIS_CA_FILE`,
`ROLLQ_REDIS_CERTIFICATE_FILE` and `ROLLQ_REDIS_KEY_FILE`. `ROLLQ_PAYLOADS_URL` locates large payloads.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import ArchiveSettings, PayloadSettings, RedisSettings
from rollq.buffer.settings_errors import changed_types, explain
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_tables import flattened, place_in_file
from rollq.environments.expansion import expanded
from rollq.workers.agents.mcp.settings import SCHEMES

ENVIRONMENT = {
    "ROLLQ_RUN": "run",
    "ROLLQ_REDIS_URL": "redis.buffer_url",
    "ROLLQ_QUEUE_URL": "redis.queue_url",
    "ROLLQ_REDIS_USER": "redis.user",
    "ROLLQ_REDIS_PASSWORD": "redis.password",
    "ROLLQ_REDIS_CA_FILE": "redis.ca_file",
    "ROLLQ_REDIS_CERTIFICATE_FILE": "redis.certificate_file",
    "ROLLQ_REDIS_KEY_FILE": "redis.key_file",
    "ROLLQ_PAYLOADS_URL": "payloads.url",
}
"""Environment variable -> key that it overrides. A file's path is relative to the working directory."""

PASSWORD_FILE = "ROLLQ_REDIS_PASSWORD_FILE"

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def load_settings(path: Path, environment: Mapping[str, str] | None = None) -> RollqSettings:
    """Read and validate `rollq.toml`; paths are returned absolute. `environment` defaults to the process's.

    Raises `ConfigError` with one line per problem.
    """
    environment = os.environ if environment is None else environment
    data = read_toml(path)
    origins = _override(data, environment)
    data, problems = flattened(data)
    if problems:
        raise _config_error(path, problems)
    folder = path.absolute().parent
    found = expanded(data, folder)
    if found.problems:
        raise _config_error(path, found.problems)
    data = found.data
    try:
        settings = RollqSettings.model_validate(data).with_environments(found.environments)
    except ValidationError as error:
        raise _config_error(path, explain(error, RollqSettings, origins, place_in_file)) from None
    if problems := list(changed_types(data, settings, place_in_file)):
        raise _config_error(path, problems)
    return _with_archive_in(folder, anchored(settings, folder))


def _with_archive_in(folder: Path, settings: RollqSettings) -> RollqSettings:
    """`settings` with the archive's folder made absolute; a bucket's URL stays."""
    url = settings.archive.url
    if url is None or url.startswith("s3:"):
        return settings
    return settings.model_copy(update={"archive": ArchiveSettings(url=str(folder / Path(url).expanduser()))})


def _config_error(path: Path, problems: list[str]) -> ConfigError:
    return ConfigError("\n  ".join([f"{path}:", *problems]) if len(problems) > 1 else f"{path}: {problems[0]}")


OPTIONS = ("options", "agent_options")
"""Tables of engines and agent loops, whose values are plain until the engines and loops validate them."""
PATH_OPTIONS = ("model", "workspace")
"""Keys with paths in these tables."""
ENGINE_TABLES = ("engine_args", "speculative_config")


def anchored(settings: AnySettings, folder: Path) -> AnySettings:
    """`settings` with every relative path made absolute, starting at `folder`."""
    return settings.model_copy(update={name: _anchored(name, value, folder) for name, value in settings})


def _anchored(name: str, value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return folder / value.expanduser()
    if isinstance(value, BaseModel):
        return anchored(value, folder)
    if isinstance(value, tuple):
        return tuple(_anchored("", item, folder) for item in value)
    if not isinstance(value, dict):
        return value
    if name in OPTIONS:
        return {key: _option(key, item, folder) for key, item in value.items()}
    return {key: anchored(item, folder) if isinstance(item, BaseModel) else item for key, item in value.items()}


def _option(key: str, value: Any, folder: Path) -> Any:
    if key in PATH_OPTIONS and isinstance(value, str | Path):
        return folder / Path(value).expanduser()
    if key == "tools" and isinstance(value, dict):
        return {name: _tool(table, folder) for name, table in value.items()}
    if key in ENGINE_TABLES and isinstance(value, dict):
        return {name: _option(name, item, folder) for name, item in value.items()}
    return value


def _tool(table: Any, folder: Path) -> Any:
    """A tool's table; an MCP server's command gets the folder in which it starts."""
    server, start = (table.get("mcp"), table.get("folder", "")) if isinstance(table, dict) else (None, None)
    if not isinstance(server, str) or server.startswith(SCHEMES) or not isinstance(start, str):
        return table
    return {**table, "folder": folder / Path(start).expanduser()}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def password_from(environment: Mapping[str, str]) -> str | None:
    """The servers' password, from the environment or a file named there; None without either."""
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
    """Write the environment's values into `data`. Returns key -> variable for each value written."""
    values = _values_from(environment)
    for path, value in values.items():
        if value:
            section, _, key = path.rpartition(".")
            owner = data.setdefault(section, {}) if section else data
            if isinstance(owner, dict):
                owner[key] = value
    return {key: name for name, key in ENVIRONMENT.items() if values[key]}


def _values_from(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The value of each key that the environment overrides."""
    values = {key: environment.get(name) for name, key in ENVIRONMENT.items()}
    paths = {key: str(Path(path).absolute()) for key, path in values.items() if path and key.endswith("_file")}
    return values | paths | {"redis.password": password_from(environment)}


def redis_from(environment: Mapping[str, str]) -> RedisSettings:
    """The environment's queue, user, password and TLS files, for a buffer whose URL is given elsewhere."""
    names = ("queue_url", "user", "password", "ca_file", "certificate_file", "key_file")
    values = _values_from(environment)
    return RedisSettings.model_validate({name: values[f"redis.{name}"] or None for name in names})


def payloads_from(environment: Mapping[str, str]) -> PayloadSettings:
    """The environment's payload URL."""
    return PayloadSettings(url=_values_from(environment)["payloads.url"] or None)
