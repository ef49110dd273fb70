"""A saved buffer as a folder: its files' content, and how files are written and checked.

    snapshot.json                       the index: what was saved, and every other file's size and SHA-256
    task-<name>/groups-00000.jsonl      one group per line, without its payload
    task-<name>/frames-00000.safetensors  the frames of those groups: "<group id>/<field>" -> uint8 [bytes]

See `rollq.buffer.wire.group_fields` for fields and frames. Invariant: the folder appears under its name complete and
synced, or not at all; `check` passes only for exactly the written bytes. The files contain no pickle, and nothing that
names code.
"""

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rollq.buffer.common.atomic_files import atomic_folder, former_folder
from rollq.buffer.common.toml_words import allowed_values
from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError, SnapshotError

SNAPSHOT_VERSION = 1
INDEX = "snapshot.json"
_FILE_NAME = r"^task-[A-Za-z0-9_.-]{1,64}/(groups-[0-9]+\.jsonl|frames-[0-9]+\.safetensors)$"

Part = dict[str, str] | list[str]
"""A Redis hash or list that is small enough for the index."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One group: its status, its `score` in the status set, its hash fields, and its frames by field."""

    group_id: int
    status: str
    score: str
    fields: Mapping[str, str]
    frames: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.frames.values()))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedFile(_Model):
    """One file's name, size and checksum, which `check` compares with the file."""

    name: str = Field(pattern=_FILE_NAME)
    size_bytes: int
    sha256: str


class SavedTask(_Model):
    """One task: its clock (with the rules), small parts (`progress`, `manifest:<step>`, ...), and groups by status."""

    clock: dict[str, str]
    parts: dict[str, Part]
    statuses: dict[str, int]


class Snapshot(_Model):
    """The index of a snapshot.

    `functions` is the saved run's schema, under the name from the first snapshots. `versions` maps versions to digests
    of published weights, and `plans` maps steps to sizes per task. `curves` maps rows, of steps and of evaluations, to
    steps. `ancestors` maps each incarnation whose trainers' checkpoints belong to this snapshot to its last step and
    epoch. `run_begin_epoch.lua` describes `undone`.
    """

    schema_version: int = Field(alias="schema")
    functions: int
    run: str
    saved_at: str
    model: str
    tokenizer: str
    epoch: int
    undone: str
    ancestors: dict[str, tuple[int, int]]
    versions: dict[str, str]
    plans: dict[str, dict[str, str]]
    curves: dict[str, dict[str, str]]
    tasks: dict[str, SavedTask]
    files: tuple[SavedFile, ...]

    @property
    def resume_steps(self) -> tuple[int, int]:
        """The first and last train steps whose checkpoints a trainer can resume from with this snapshot."""
        clocks = [task.clock for task in self.tasks.values() if task.clock["kind"] == "train"]
        return (
            max((int(clock["history"]) for clock in clocks), default=0),
            min((int(clock["committed"]) for clock in clocks), default=0),
        )

    @property
    def groups(self) -> int:
        """The number of groups in all tasks."""
        return sum(sum(task.statuses.values()) for task in self.tasks.values())


class Writer:
    """Writes a snapshot's files, in a folder that nobody reads yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[SavedFile] = []

    def add(self, task: str, groups: Sequence[SavedGroup]) -> None:
        """Write one chunk of a task's groups, in order, as two files."""
        folder = self._folder / f"task-{task}"
        folder.mkdir(exist_ok=True)
        number = sum(file.name.startswith(f"task-{task}/groups-") for file in self._files)
        lines = b"".join(_line(group) for group in groups)
        self._write(f"task-{task}/groups-{number:05}.jsonl", lines)
        frames = {
            f"{group.group_id}/{field}": np.frombuffer(frame, np.uint8)
            for group in groups
            for field, frame in group.frames.items()
        }
        self._write(f"task-{task}/frames-{number:05}.safetensors", save(frames))

    def finish(self, **manifest: Any) -> Snapshot:
        """Write the index of all files so far, and return the index."""
        snapshot = Snapshot(schema=SNAPSHOT_VERSION, files=tuple(self._files), **manifest)
        body = snapshot.model_dump(by_alias=True)
        body["digest"] = _digest(body)
        self._write_synced(INDEX, orjson.dumps(body, option=orjson.OPT_INDENT_2))
        return snapshot

    def _write(self, name: str, content: bytes) -> None:
        self._write_synced(name, content)
        self._files.append(SavedFile(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))

    def _write_synced(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            with path.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # a full disk may only show now
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def writing(directory: Path, *, replace: bool) -> Iterator[Writer]:
    """Yield a `Writer` whose files appear as `directory` when the block succeeds, and leave no trace when it fails. A
    killed process leaves a hidden folder beside `directory`, which the next save removes. Raises `ConfigError` if
    `directory` holds anything but a snapshot, or a snapshot without `replace`, or cannot be written.
    """
    directory = directory.absolute()
    _check_target(directory, replace)
    hidden = directory.with_name(f".{directory.name}.saving")
    with _locked(hidden, directory), atomic_folder(directory, hidden=hidden) as folder:
        yield Writer(folder)
        _check_target(directory, replace)  # a save takes minutes, and something else may have been put there


@contextmanager
def _locked(hidden: Path, directory: Path) -> Iterator[None]:
    with writing_to("snapshot folder", directory):
        hidden.mkdir(parents=True, exist_ok=True)
        lock = os.open(hidden, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{str(directory)!r} is being written by another process: wait, or name another folder"
            ) from None
        yield
    finally:
        os.close(lock)


def _parsed(directory: Path, path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        former = former_folder(directory.absolute())
        hint = f"; a former one is in {str(former)!r}" if (former / INDEX).exists() else ""
        raise SnapshotError(f"{str(directory)!r} is not a snapshot: it has no {INDEX}{hint}") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error


def read_index(directory: Path) -> tuple[Snapshot, str]:
    """Read the index in `directory`; returns it and its digest. Raises `SnapshotError` naming the file."""
    path = directory / INDEX
    body = _parsed(directory, path)
    schema = body.get("schema") if isinstance(body, dict) else None
    if schema != SNAPSHOT_VERSION:
        raise SnapshotError(
            f"{path}: has schema {schema!r}, this rollq reads {SNAPSHOT_VERSION}: use the rollq that wrote it"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise SnapshotError(f"{path}: its digest is wrong: the file was changed; restore from another copy")
    try:
        return Snapshot.model_validate(body), digest
    except ValidationError as error:
        first = error.errors()[0]
        raise SnapshotError(f"{path}: {'.'.join(map(str, first['loc']))}: {allowed_values(first)}") from None


def check(directory: Path, snapshot: Snapshot) -> None:
    """Compare the files with the index: their SHA-256, and their groups by status. Raises `SnapshotError`, naming the
    first file that is missing, changed or different."""
    for file in snapshot.files:
        path = directory / file.name
        try:
            with path.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be read: {error.strerror}; restore from another copy") from error
        if sha256 != file.sha256:
            raise SnapshotError(f"{path}: its SHA-256 is not the one in the index: it was changed or truncated")
    for name, task in snapshot.tasks.items():
        counted = Counter(group.status for group in read_groups(directory, snapshot, name))
        if counted != Counter(task.statuses):
            raise SnapshotError(
                f"{directory / INDEX}: groups of task {name!r} are {task.statuses}, found {dict(counted)}"
            )


def read_groups(directory: Path, snapshot: Snapshot, task: str) -> Iterator[SavedGroup]:
    """Yield a task's groups, in the order in which they were added."""
    for file in snapshot.files:
        if file.name.startswith(f"task-{task}/groups-"):
            path = directory / file.name
            frames_path = path.with_name(path.name.replace("groups-", "frames-").replace(".jsonl", ".safetensors"))
            yield from _read_chunk(path, frames_path)


def _read_chunk(path: Path, frames_path: Path) -> Iterator[SavedGroup]:
    try:
        tensors = load(frames_path.read_bytes())
        lines = path.read_bytes().splitlines()
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{frames_path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            group = orjson.loads(line)
            frames = {str(field): tensors[f"{group['id']}/{field}"].tobytes() for field in group["frames"]}
            yield SavedGroup(group["id"], group["status"], group["score"], group["fields"], frames)
        except (LookupError, TypeError, orjson.JSONDecodeError) as error:
            raise SnapshotError(f"{path}:{number}: is not a saved group: {error!r}") from error


def _line(group: SavedGroup) -> bytes:
    fields = {"id": group.group_id, "status": group.status, "score": group.score, "fields": group.fields}
    return orjson.dumps({**fields, "frames": list(group.frames)}, option=orjson.OPT_APPEND_NEWLINE)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _check_target(directory: Path, replace: bool) -> None:
    if (directory / INDEX).exists():
        if not replace:
            raise ConfigError(f"{str(directory)!r} holds a snapshot already: name another folder, or pass --replace")
    elif directory.is_dir() and not any(directory.iterdir()):
        return
    elif directory.exists() or directory.is_symlink():
        raise ConfigError(f"{str(directory)!r} exists and is not a snapshot: name another folder")
