"""Expands `env = "kind:name"` into ordinary keys of a task or an evaluation, and names the environment's row files.

Keys that the user sets take precedence. This module neither imports an environment's package nor makes rows.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import Kind, Source, kind_named, split_env

FOLDER: Final = "environments"
"""The folder beside `rollq.toml` with the row files."""
TASK_ROWS: Final = 5_000
EVALUATION_ROWS: Final = 200
"""The most rows of an environment to make, unless `env_options.rows` is set."""
NEED_ENV: Final = ("env_options", "env_split", "env_shared")
MERGED: Final = {"agent_loop": "agent_options", "judge": "judge_options"}
"""Keys, each with the table of its options. The user may set some of these options."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One `env` in a settings file. `left_out` holds evaluations of the same environment, whose rows are excluded.
    `folder`, with `rollq.toml`, is the base of relative paths."""

    env: str
    options: Mapping[str, Any]
    split: str
    rows: int
    left_out: tuple["Environment", ...] = ()
    folder: Path = Path()

    @property
    def kind(self) -> Kind:
        """The environment's kind. Raises `ConfigError`."""
        return kind_named(split_env(self.env)[0])

    def open(self) -> Source:
        """The source of the environment's rows. Raises `ConfigError`."""
        return self.kind.open(split_env(self.env)[1], self.options, self.split, self.folder)

    @property
    def makes_rows(self) -> bool:
        """Whether the environment makes rows. If not, the user supplies the prompts."""
        return bool(getattr(self.open(), "makes_rows", True))

    def identity(self) -> str:
        """The package, its version, and the options that rows, grader and episodes depend on, as one string."""
        return f"{self.env} ({', '.join(f'{name} {value}' for name, value in self.open().identity().items())})"

    def installed_identity(self) -> str:
        """`identity`, for roles that make rows or judge them. Raises `ConfigError` without the environment's
        package."""
        if not self.kind.installed():
            raise ConfigError(f'env = "{self.env}" needs a package: {self.kind.install()}')
        return self.identity()

    def file(self) -> Path:
        """The environment's row file, relative to the folder of `rollq.toml`."""
        facts = [self.identity(), self.rows, *(str(other.file()) for other in self.left_out)]
        digest = hashlib.sha256(exact_json.dumps(facts)).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", split_env(self.env)[1]).strip("-")[:60]
        return Path(FOLDER) / f"{name}-{digest}.jsonl"


@dataclass(frozen=True, slots=True)
class Expanded:
    """The content of `rollq.toml` as flat tables, with the keys that each `env` sets.

    `environments` maps a table, `tasks` or `evaluations`, and a name to each environment. `problems` has a line for
    each `env` that cannot be expanded.
    """

    data: dict[str, Any]
    environments: Mapping[tuple[str, str], Environment]
    problems: list[str]


def expanded(data: Mapping[str, Any], folder: Path) -> Expanded:
    """Expand each `env` in the content of the `rollq.toml` in `folder`."""
    problems: list[str] = []
    filled = dict(data)
    known = _environments_of(data, folder, problems)
    for root in ("evaluations", "tasks"):
        if isinstance(tables := data.get(root), dict):
            filled[root] = {
                name: _expanded(f"{root}.{name}", table, known.get((root, name)), problems)
                for name, table in tables.items()
            }
    return Expanded(filled, known, problems)


def _environments_of(data: Mapping[str, Any], folder: Path, problems: list[str]) -> dict[tuple[str, str], Environment]:
    """The environments of evaluations and tasks, by table and name, from flat tables. Adds invalid environments'
    problems to `problems`."""
    known: dict[tuple[str, str], Environment] = {}
    evaluated: list[Environment] = []
    for root, name, table in _tables(data):
        place = f"{root}.{name}"
        try:
            environment = _environment(table, EVALUATION_ROWS if root == "evaluations" else TASK_ROWS, place, folder)
            environment = _sharing(evaluated, environment, root, table)
        except ConfigError as error:
            problems.append(f"{place}.{error}" if str(error).startswith("env") else f"{place}.env: {error}")
            continue
        if root == "evaluations" and _uses_rows(table, environment):
            evaluated.append(environment)
        known[root, name] = environment
    return known


def _sharing(
    evaluated: Iterable[Environment], environment: Environment, root: str, table: Mapping[str, Any]
) -> Environment:
    """The environment, without evaluations' rows unless it shares them. Raises `ConfigError`."""
    _check_rows_are_used(table, environment)
    if root == "evaluations" and table.get("env_shared"):
        raise ConfigError("env_shared: only for tasks; leave it out")
    is_separate = root == "tasks" and _uses_rows(table, environment) and not table.get("env_shared")
    return _without(evaluated, environment) if is_separate else environment


def _uses_rows(table: Mapping[str, Any], environment: Environment) -> bool:
    return environment.makes_rows and "prompts" not in table


def _check_rows_are_used(table: Mapping[str, Any], environment: Environment) -> None:
    """Raise `ConfigError` for a key about rows if the environment makes none."""
    if _uses_rows(table, environment):
        return
    keys, reason = ["env_split", "env_shared"], f'env = "{environment.env}" has no rows'
    if environment.makes_rows:
        keys, reason = ["env_shared"], "prompts is set, so no rows are made"
    given = [key for key in keys if table.get(key)]
    given += ["env_options.rows"] if "rows" in table.get("env_options", {}) else []
    if given:
        raise ConfigError(f"{given[0]}: {reason}; leave it out")


def _without(evaluated: Iterable[Environment], environment: Environment) -> Environment:
    """A task's environment without evaluations' rows. Raises `ConfigError` if an evaluation has the same split."""
    same = tuple(other for other in evaluated if other.env == environment.env)
    if any(other.split == environment.split for other in same):
        raise ConfigError(
            f"env_split = {environment.split!r}: an evaluation has the same rows; give it a different split, such as "
            'env_split = "test", or set env_shared = true'
        )
    return replace(environment, left_out=same)


def _tables(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for root in ("evaluations", "tasks"):
        tables = data.get(root)
        for name, table in tables.items() if isinstance(tables, dict) else ():
            if isinstance(table, dict) and isinstance(table.get("env"), str):
                yield root, name, table


def _environment(table: Mapping[str, Any], rows: int, place: str, folder: Path) -> Environment:
    options = table.get("env_options", {})
    if not isinstance(options, dict):
        raise ConfigError(f"env_options = {options!r:.80}: must be a table")
    options = dict(options)
    rows = options.pop("rows", rows)
    if type(rows) is not int or rows < 1:
        raise ConfigError(f"env_options.rows = {rows!r:.80}: must be a whole number, 1 or more")
    split = table.get("env_split") or ("train" if place.startswith("tasks") else "test")
    if not isinstance(split, str):
        raise ConfigError(f"env_split = {split!r:.80}: must be a string in quotes")
    return Environment(table["env"], options, split, rows, folder=folder)


def _without_environment(place: str, table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        return
    if "env" not in table:
        yield from (f"{place}.{key}: set env too" for key in NEED_ENV if table.get(key))
    elif not isinstance(table["env"], str):
        yield f"{place}.env = {table['env']!r:.80}: must be a string in quotes"


def _expanded(place: str, table: Any, environment: Environment | None, problems: list[str]) -> Any:
    if environment is None:
        problems += _without_environment(place, table)
        return table
    if table.get("offline") is True:  # refused with the user's keys
        return table
    try:
        given = dict(environment.open().settings())
    except ConfigError as error:
        problems.append(f"{place}.{error}")
        return table
    if problem := _other_loop(table, given, environment):
        problems.append(f"{place}.{problem}")
        return table
    if environment.makes_rows:
        given["prompts"] = str(environment.file())
    elif "prompts" not in table:
        problems.append(f'{place}: env = "{environment.env}" has no prompts: set prompts')
    return _with_own(given, table)


def _with_own(given: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's keys and the user's."""
    for key, options in MERGED.items():
        if table.get(key, given.get(key)) != given.get(key):  # they belong to another judge or loop
            given.pop(options, None)
    return {**given, **table, **{key: _merged(given.get(key), table[key]) for key in MERGED.values() if key in table}}


def _merged(given: Any, own: Any) -> Any:
    """The user's value, or the environment's. Tables, such as tools, have the keys of both."""
    if not (isinstance(given, dict) and isinstance(own, dict)):
        return own
    return {**given, **{key: _merged(given.get(key), value) for key, value in own.items()}}


def _other_loop(table: Mapping[str, Any], given: Mapping[str, Any], environment: Environment) -> str:
    """Why the user's agent loop does not fit an environment; empty if it fits, as a custom loop for rows does."""
    own, loop = table.get("agent_loop"), given.get("agent_loop")
    if own is None or loop in (None, own) or (environment.makes_rows and "." in str(own)):
        return ""
    return f'agent_loop = {own!r:.80}: env = "{environment.env}" sets agent_loop = "{loop}"; leave one of them out'
