"""`rollq convert` without the command line: a file of XTuner or Trinity-RFT to the text of a `rollq.toml`."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.common.counting import count
from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import changed_types
from rollq.cli.settings.migration import trinity, xtuner
from rollq.cli.settings.migration.conversion import Conversion
from rollq.cli.settings.migration.python_file import assigned
from rollq.cli.settings.migration.written import Written
from rollq.cli.settings.migration.yaml_file import content
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_tables import flattened, place_in_file

LARGEST_BYTES: Final = 1 << 20
MOST_REFUSALS: Final = 50


@dataclass(frozen=True, slots=True)
class NewSettings:
    """The text of a new `rollq.toml`, a summary of what it has, and what rollq still refuses about it."""

    text: str
    summary: str
    problem: str


def converted(path: Path) -> NewSettings:
    """The new file for the settings in `path`. Raises `ConfigError` if they are not of XTuner or Trinity-RFT."""
    run = _conversion(path, _read(path))
    problem = _accepted(run.written)
    head = (
        f"From {path.name}, settings of {run.system.name}, by `rollq convert`. rollq's table is of {run.system.name} "
        f"{run.system.version}. Environment variables count as unset. Comments say where the two differ, and what to "
        "replace."
    )
    summary = (
        f"{count(run.converted, 'setting')} converted, {run.without} without an equivalent, "
        f"{run.elsewhere} with one outside of rollq.toml: see the comments"
    )
    text = run.written.text(head)
    return NewSettings(text, summary, problem)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, so not a file of settings")
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


def _conversion(path: Path, text: str) -> Conversion:
    match path.suffix.lower():
        case ".py":
            return xtuner.convert(path, xtuner.trainer_of(path, assigned(path, text)))
        case ".yaml" | ".yml":
            return trinity.convert(path, trinity.checked(path, content(path, text)))
        case ".toml":
            raise ConfigError(
                f"{path}: a TOML file; `rollq convert` reads XTuner's Python files and Trinity-RFT's YAML files"
            )
        case _:
            raise ConfigError(
                f"{path}: neither a Python file of XTuner (.py) nor a YAML file of Trinity-RFT (.yaml, .yml)"
            )


def _accepted(written: Written) -> str:
    """Turn keys into comments until rollq accepts the rest. Returns what it still refuses, or ""."""
    for _ in range(MOST_REFUSALS):
        data, problems = flattened(written.data())
        if problems:
            return problems[0]
        try:
            settings = RollqSettings.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = place_in_file(first["loc"])
            path = next((path for path in written.values if path == tuple(map(str, place))[: len(path)]), None)
            message = _sentence(first)
            if path is None or path[-1] in _NEEDED:
                return f"{'.'.join(map(str, place)) or 'rollq.toml'}: {message}"
            written.drop(path, message)
        else:
            return next(iter(changed_types(data, settings, place_in_file)), "")
    return "too many of its values are out of bounds"


_NEEDED: Final = ("run", "prompts", "batch_groups", "groups", "model", "output", "steps")


def _sentence(error: Any) -> str:
    return textwrap.shorten(str(error["msg"]).removeprefix("Value error, "), 300)
