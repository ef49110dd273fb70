"""Writes an environment's rows to a file: the same rows from every process, without repeats.

A child process makes them, with a fixed hash seed, without torch, and without secrets in its environment. The file
appears complete or not at all.
"""

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.common.atomic_files import atomic_file
from rollq.buffer.errors import ConfigError
from rollq.environments.expansion import Environment
from rollq.environments.row_processes import row_process
from rollq.environments.time_limits import TimeLimit
from rollq.workers.judging.environment import known_to_be_harmless

log = logging.getLogger(__name__)

COMPARED: Final = 200
"""How many of the first rows are made again under another hash seed."""
PATIENCE: Final = 1_000
"""An environment counts as exhausted after this many consecutive repeats, or after twice as many as it has given
different rows, if that is more."""
REPORT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Written:
    """Numbers of rows: in a file, and left out as repeats or as an evaluation's rows. `unstable` counts the first rows
    that differ under another hash seed."""

    rows: int
    repeated: int
    evaluated: int
    unstable: int

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows"]
        parts += [f"{self.repeated:,} repeats left out"] if self.repeated else []
        parts += [f"{self.evaluated:,} rows of an evaluation left out"] if self.evaluated else []
        parts += [f"{self.unstable} of the first {COMPARED} depend on the hash seed"] if self.unstable else []
        return ", ".join(parts)


def write_missing_rows(environment: Environment, folder: Path) -> Path:
    """An environment's row file below `folder`, written if it does not exist. Raises `ConfigError`."""
    path = folder / environment.file()
    if not path.exists():
        written = write_rows(environment, path, folder)
        log.info("%s: wrote %s to %s", environment.env, written, path)
    return path


def write_rows(environment: Environment, path: Path, folder: Path) -> Written:
    """Write an environment's rows to `path`. The row files of left-out evaluations are in `folder`, or are written
    there.

    Raises `ConfigError`.
    """
    others = [_digests(write_missing_rows(other, folder)) for other in environment.left_out]
    sieve = _Sieve(set[bytes]().union(*others))
    lines: list[bytes] = []
    reported_s = time.monotonic()
    with closing(made_rows(environment)) as rows:
        for row in islice(sieve.new(rows), environment.rows):
            lines.append(exact_json.dumps(row) + b"\n")
            if time.monotonic() - reported_s > REPORT_S:
                log.info("%s: %s rows so far", environment.env, f"{len(lines):,}")
                reported_s = time.monotonic()
    if not lines:
        raise ConfigError(
            f'env = "{environment.env}": there are no rows'
            + (" except rows of evaluations: set a smaller env_options.rows for these" if sieve.left_out else "")
        )
    try:
        atomic_file(path, b"".join(lines))
    except OSError as error:
        raise ConfigError(f'env = "{environment.env}": {path} cannot be written: {error.strerror}') from error
    return Written(len(lines), sieve.repeated, sieve.left_out, unstable_rows(environment, COMPARED, sieve.first))


@dataclass(slots=True)
class _Sieve:
    """Lets each row through once, except evaluations' rows, whose digests are `evaluated`. `first` holds the first rows
    that came."""

    evaluated: Set[bytes]
    first: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    left_out: int = 0

    def new(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield rows that come for the first time, until only repeats have come for too long."""
        seen, since_new = set[bytes](), 0
        for row in rows:
            self._keep(row)
            digest = digest_of(row)
            if digest in seen:
                self.repeated, since_new = self.repeated + 1, since_new + 1
                if since_new >= max(PATIENCE, 2 * len(seen)):
                    return
                continue
            since_new = 0
            seen.add(digest)
            if digest in self.evaluated:
                self.left_out += 1
            else:
                yield row

    def _keep(self, row: dict[str, Any]) -> None:
        if len(self.first) < COMPARED:
            self.first.append(row)


def first_row(environment: Environment) -> dict[str, Any]:
    """The first row of an environment. Raises `ConfigError` if there is none."""
    with closing(made_rows(environment)) as rows:
        for row in rows:
            return row
    raise ConfigError(f'env = "{environment.env}": there are no rows')


def unstable_rows(
    environment: Environment, most: int, made: Sequence[Mapping[str, Any]] = (), limit: TimeLimit | None = None
) -> int:
    """How many of the first rows differ under another hash seed. `made` holds the first rows, if already made. `limit`
    is the time limit for making them again."""
    first = made[:most]
    if not first:
        with closing(made_rows(environment)) as rows:
            first = list(islice(rows, most))
    with closing(made_rows(environment, hash_seed=1, limit=limit)) as second:
        return sum(one != other for one, other in zip(first, islice(second, len(first)), strict=False))


def digest_of(row: Mapping[str, Any]) -> bytes:
    """A row's digest, over its prompt and, if the prompt does not determine the episode, over its episode. Rows with
    equal digests are the same task."""
    episode = row["env"] if row.get("env", {}).keys() & {"opening", "task"} else None
    return hashlib.sha256(exact_json.dumps([row.get("messages", row.get("prompt")), episode])).digest()


def made_rows(
    environment: Environment, *, hash_seed: int = 0, limit: TimeLimit | None = None
) -> Generator[dict[str, Any], None, None]:
    """The rows that a child process makes within `limit`. Closing the iterator ends the process. Raises `ConfigError`
    with the process's error."""
    asked = {
        "env": environment.env,
        "options": dict(environment.options),
        "split": environment.split,
        "folder": str(environment.folder),
        "parent": os.getpid(),
    }
    variables = {
        **known_to_be_harmless(os.environ),
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-P", "-m", "rollq.environments.making_rows"]
    limit = limit or TimeLimit(threading.TIMEOUT_MAX)
    with row_process(command, variables, exact_json.dumps(asked)) as making, limit.on(making.process):
        yield from making.rows()
        if (error := making.error()) and not limit.is_over:
            raise ConfigError(f'env = "{environment.env}": {error}')


def _digests(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield digest_of(exact_json.loads(line))
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}:{number}: not a row: remove the file to have it written again") from error
