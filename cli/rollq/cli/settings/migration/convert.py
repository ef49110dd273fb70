"""`rollq convert` without the command line: converts a file of XTuner or Trinity-RFT to the text of a `rollq.toml`."""

import os
import stat
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.common.counting import count
from rollq.buffer.common.toml_words import allowed_values
from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import changed_types
from rollq.cli.settings.migration import trinity, xtuner
from rollq.cli.settings.migration.conversion import Conversion
from rollq.cli.settings.migration.python_file import assigned
from rollq.cli.settings.migration.yaml_file import content
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_tables import flattened, place_in_file

LARGEST_BYTES: Final = 1 << 20
MOST_REFUSALS: Final = 50


@dataclass(frozen=True, slots=True)
class NewSettings:
    """A new `rollq.toml`'s text, a summary of its content, and the reason why rollq still refuses the file."""

    text: str
    summary: str
    problem: str


def converted(path: Path) -> NewSettings:
    """The new file for the settings in `path`. Raises `ConfigError` for settings of neither XTuner nor Trinity-RFT."""
    try:
        run = _conversion(path, _read(path))
        problem = _accepted(run)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply, or contains itself: write its values out") from None
    lost = [f"NOT READ: {text}: known only when the file runs. Write a table for each task." for text in run.unread]
    head = (
        f"Converted by `rollq convert` from {path.name}, settings of {run.system.name}. rollq knows the settings of "
        f"{run.system.name} {run.system.version}. Environment variables count as unset. Comments say where the two "
        "differ, and what to replace."
    )
    tasks = f"{count(len(run.unread), 'task')} not read, " if run.unread else ""
    summary = (
        f"{tasks}{count(run.converted, 'setting')} converted, {run.to_replace} to replace, {run.without} without an "
        f"equivalent, {run.elsewhere} with one outside rollq.toml: see the comments"
    )
    text = run.written.text(head, *lost)
    try:
        tomllib.loads(text.encode().decode())
    except ValueError as error:
        raise ConfigError(f"{path}: has no form in TOML: {error}") from None
    return NewSettings(text, summary, problem)


def _read(path: Path) -> str:
    """The text of a file. A pipe is refused without waiting for it."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: not a regular file")
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB, so not a file of settings")
    try:
        return content.decode("utf-8-sig")
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


def _accepted(run: Conversion) -> str:
    """Turn keys into comments until rollq accepts the rest. Returns the remaining problem, or ""."""
    for _ in range(MOST_REFUSALS):
        data, problems = flattened(run.written.data())
        if problems:
            return problems[0]
        try:
            settings = RollqSettings.model_validate(data)
        except ValidationError as error:
            if problem := _left_out(run, error.errors(include_url=False)[0]):
                return problem
        else:
            return next(iter(changed_types(data, settings, place_in_file)), "")
    return "too many of its values are out of bounds"


def _left_out(run: Conversion, error: Any) -> str:
    """Turn an error's key into a comment. Returns the error if a run needs the key, or ""."""
    written, place, message = run.written, place_in_file(error["loc"]), textwrap.shorten(allowed_values(error), 300)
    path = next((path for path in written.values if path == tuple(map(str, place))[: len(path)]), None)
    if path is None or path[-1] in _NEEDED:
        return f"{'.'.join(map(str, place)) or 'rollq.toml'}: {message}"
    written.drop(path, message)
    run.to_replace += 1
    return ""


_NEEDED: Final = ("run", "prompts", "batch_groups", "groups", "model", "output", "steps")
