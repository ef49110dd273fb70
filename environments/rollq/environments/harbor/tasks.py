"""Tasks in Harbor's layout, a folder per task. Only reads files; needs no package."""

import hashlib
import os
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import explanation

INSTRUCTION: Final = "instruction.md"
SETTINGS: Final = "task.toml"
FILES: Final = "environment"
"""The folder with the files for the command."""
TESTS: Final = "tests"
TEST: Final = "test.sh"
SOLUTION: Final = "solution"
SOLVE: Final = "solve.sh"
DOCKERFILE: Final = "Dockerfile"
COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml")
BUILT: Final = "rollq-harbor"
"""The name of images that rollq builds. An image's tag is the digest of its files."""
NEEDED: Final = (INSTRUCTION, SETTINGS, FILES, f"{TESTS}/{TEST}")
TRAIN: Final = "train"
"""The split of a task folder without split folders."""
_HOST_VARIABLE: Final = re.compile(r"\$\{")


class Step(BaseModel):
    """A table in `task.toml` about one command."""

    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)


class Image(BaseModel):
    """The table `environment`."""

    docker_image: str = ""


class TaskSettings(BaseModel):
    """The keys of `task.toml` that rollq uses."""

    agent: Step = Step()
    verifier: Step = Step()
    solution: Step = Step()
    environment: Image = Image()
    steps: list[Any] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """The task in `folder` / `name`; `name` may begin with a split's folder."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """The task's folder."""
        return self.folder / self.name

    def instruction(self) -> str:
        """The text for the model. Raises `ConfigError`."""
        try:
            text = (self.path / INSTRUCTION).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path / INSTRUCTION} cannot be read: {error}") from error
        if not text:
            raise ConfigError(f"{self.path / INSTRUCTION} is empty: write the task for the model")
        return text

    def settings(self) -> TaskSettings:
        """The task's `task.toml`. Raises `ConfigError`."""
        path = self.path / SETTINGS
        try:
            given = TaskSettings(**tomllib.loads(path.read_text()))
        except ValidationError as error:
            raise ConfigError(f"{path}: {explanation(error, TaskSettings)}") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if given.steps:
            raise ConfigError(f"{path}: steps: tasks with several steps are not supported; make each step a task")
        for table in ("verifier", "solution"):
            for name, value in getattr(given, table).env.items():
                if _HOST_VARIABLE.search(value):
                    raise ConfigError(
                        f"{path}: {table}.env.{name} = {value!r:.80}: tests get no environment variables of this "
                        "machine; write the value"
                    )
        return given

    def image(self) -> str:
        """The task's image, built from its files if there is a `Dockerfile`; empty without an image. Raises
        `ConfigError`."""
        if named := self.settings().environment.docker_image:
            return named
        return f"{BUILT}:{files_digest(self)}" if self.has_image() else ""

    def has_image(self) -> bool:
        """Whether the task runs in an image. Raises `ConfigError`."""
        return (self.path / FILES / DOCKERFILE).exists() or bool(self.settings().environment.docker_image)

    def compose(self) -> str:
        """The file that defines several containers; empty without such a file."""
        return next((f"{FILES}/{name}" for name in COMPOSE if (self.path / FILES / name).exists()), "")


def tasks_in(folder: Path, split: str) -> tuple[HarborTask, ...]:
    """A split's tasks, by name: in the folder with the split's name or, for "train", in `folder` itself.

    Raises `ConfigError` for a folder that is missing, is empty, or has an incomplete task.
    """
    place = _place_of(folder, split)
    prefix = "" if place == folder else f"{split}/"
    found = [HarborTask(folder, prefix + name) for name in _folders_in(place)]
    tasks = tuple(task for task in found if prefix or not _is_split(task))
    if not tasks:
        raise ConfigError(f"{place} has no tasks: folders with {', '.join(NEEDED)}")
    for task in tasks:
        _check_complete(task)
    return tasks


def _place_of(folder: Path, split: str) -> Path:
    """The folder with a split's tasks."""
    if not folder.is_dir():
        raise ConfigError(f'"harbor:{folder}": {folder} is not a folder')
    place = folder / split
    if not place.is_dir() and split == TRAIN:
        place = folder
    if not place.is_dir() or _is_task(place):
        raise ConfigError(
            f'env_split = "{split}": there is no folder {place}; put tasks there, or name another folder of tasks, '
            f'with env_split = "{TRAIN}"'
        )
    return place


def digest_of(tasks: tuple[HarborTask, ...]) -> str:
    """The digest of all tasks' files and file names. Raises `ConfigError`."""
    return _digest_of(tuple(seen for task in tasks for seen in _seen(task)))


def files_digest(task: HarborTask) -> str:
    """The digest of the files for building an image. Tasks with equal files have equal digests. Raises
    `ConfigError`."""
    start = f"{task.name}/{FILES}/"
    seen = (each for each in _seen(task) if each[1].startswith(start))
    return _digest_of(tuple((path, name.removeprefix(start), mode, size, ns) for path, name, mode, size, ns in seen))


def _digest_of(files: tuple[tuple[str, str, int, int, int], ...]) -> str:
    try:
        return _digest(files)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error


def _is_task(path: Path) -> bool:
    return (path / INSTRUCTION).exists() or (path / SETTINGS).exists()


def _folders_in(place: Path) -> list[str]:
    """The names of the folders in `place`, without hidden ones."""
    return sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _is_split(task: HarborTask) -> bool:
    """Whether this is a split's folder, not a task's."""
    return not _is_task(task.path) and any(_is_task(each) for each in task.path.iterdir() if each.is_dir())


def _check_complete(task: HarborTask) -> None:
    if task.path.is_symlink():
        raise ConfigError(f"{task.path} is a link: copy the task there, since commands may see no other folder")
    if missing := next((name for name in NEEDED if not (task.path / name).exists()), ""):
        remedy = " (a folder, which may be empty)" if missing == FILES else ""
        raise ConfigError(f"{task.path} is not complete: {missing}{remedy} is missing")
    task.settings()


def _seen(task: HarborTask) -> list[tuple[str, str, int, int, int]]:
    """Files with the attributes that reveal changes: path, name, mode, size and time. Includes links' targets, and
    folders within the folder of all tasks."""
    found = []
    root, walked = os.path.realpath(task.folder), {os.path.realpath(task.path)}
    for place, folders, files in os.walk(task.path, followlinks=True):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            name = f"{task.name}/{os.path.relpath(path, task.path)}"
            found.append(_facts(path, name, os.lstat(path)))
            if os.path.islink(path) and os.path.isfile(path):
                found.append(_facts(os.path.realpath(path), f"{name}@", os.stat(path)))
        inside = {name: os.path.realpath(os.path.join(place, name)) for name in sorted(folders)}
        folders[:] = [name for name, real in inside.items() if real.startswith(f"{root}/") and real not in walked]
        walked.update(inside.values())
    return sorted(found)


def _facts(path: str, name: str, status: os.stat_result) -> tuple[str, str, int, int, int]:
    return path, name, status.st_mode, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4096)
def _digest(files: tuple[tuple[str, str, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, name, mode, _, _ in files:
        if os.path.islink(path):
            content = os.readlink(path).encode()
        else:
            content = b"" if os.path.isdir(path) else Path(path).read_bytes()
        executable = b"x" if mode & 0o100 else b"-"
        for part in (name.encode(), executable, content):
            digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()[:16]
