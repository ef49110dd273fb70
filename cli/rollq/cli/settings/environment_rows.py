"""The rows and identities of a settings file's environments."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_tables import place_of
from rollq.environments.rows import write_missing_rows


def identities(settings: RollqSettings, *, with_rows: bool = False) -> dict[str, str]:
    """A name, such as `environment of tasks.sums` -> its package, version and options, as one string. With `with_rows`,
    covers only environments that have rows.

    Raises `ConfigError` without the package.
    """
    found: dict[str, str] = {}
    for (root, name), environment in settings.environments.items():
        if environment.makes_rows or not with_rows:
            with _named(root, name):
                found[f"environment of {root}.{name}"] = environment.installed_identity()
    return found


def write_missing_prompts(settings: RollqSettings, file: Path) -> None:
    """Write the rows of environments without a row file, beside the settings `file`. Raises `ConfigError`."""
    folder = file.absolute().parent
    for (root, name), environment in settings.environments.items():
        table = settings.tasks[name] if root == "tasks" else settings.evaluations[name]
        if environment.makes_rows and table.prompts == folder / environment.file():
            with _named(root, name):
                write_missing_rows(environment, folder)


@contextmanager
def _named(root: str, name: str) -> Iterator[None]:
    """Prefix errors with the name of their table."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{root}.{name}: {error}") from error


def toml_of(root: str, name: str, table: Mapping[str, Any]) -> str:
    """A table of tasks or evaluations, as written without env."""
    keys = [key for key in table if not key.startswith("env")]
    return "\n".join([f"[{root}.{name}]", *(f"{place_of(key)} = {_value(table[key])}" for key in keys)])


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
