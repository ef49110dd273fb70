"""The kinds of environments and their interface: `env = "kind:name"` is opened as a source of rows.

A kind imports no heavy package, since it is opened whenever `rollq.toml` is read. Its rows and graders may import one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Protocol

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.suggestions import did_you_mean
from rollq.buffer.errors import ConfigError

GROUP: Final = "rollq.environments"
"""The entry point group with which other packages add kinds."""
BUILT_IN: Final[Mapping[str, str]] = {
    "harbor": "rollq.environments.harbor.kind.Harbor",
    "mcp": "rollq.environments.mcp.kind.Mcp",
    "openenv": "rollq.environments.openenv.kind.OpenEnv",
    "reasoning-gym": "rollq.environments.reasoning_gym.kind.ReasoningGym",
    "text": "rollq.environments.text.kind.Text",
    "verifiers": "rollq.environments.verifiers.kind.Verifiers",
}
"""Kind -> the dotted path of its class, which is imported when the kind is used."""


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # training on it would be wrong
    WARNING = "warning"  # worth knowing
    NOTE = "note"  # information, such as the number of rows


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; `row` is the index of the row that shows it, or None for the whole environment."""

    level: Level
    text: str
    row: int | None = None


class Source(Protocol):
    """One environment's rows, and how to sample and judge them."""

    def identity(self) -> dict[str, str]:
        """All that the rows depend on: the package, the version in its metadata, the options and the split."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows in order, as JSON: `prompt` or `messages`, `answer` if there is one, and `env`, with which workers
        reopen the row's episode. Rows are the same in every process and on every machine."""

    def settings(self) -> dict[str, Any]:
        """The keys of a task that this environment sets, by field: `judge`, `agent_loop`, `agent_options`, ..."""

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """Faults, found without a model, in these rows, their grader and their episodes."""


class Kind(Protocol):
    """A kind of environments, named before the colon of `env`."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> Source:
        """The environment of this name. Relative paths in `name` and `options` start at `folder`, on which the
        environment's identity does not depend. Raises `ConfigError` for a name, an option or a split that does not
        exist."""

    def installed(self) -> str:
        """The required package's version; empty if it is not installed. A kind without a package returns "built in"."""

    def install(self) -> str:
        """How to install the kind's requirements."""

    def names(self) -> Iterable[str]:
        """The names that the kind knows; empty if only the user knows them."""


def path_in(folder: Path, written: str) -> Path:
    """The user's path, relative to `folder` unless it is absolute or starts in a home folder."""
    return folder / Path(written).expanduser()


def split_env(env: str) -> tuple[str, str]:
    """The kind and the name in `env`. Raises `ConfigError`."""
    kind, colon, name = env.partition(":")
    if not (kind and colon and name):
        raise ConfigError(
            f'env = "{env}": write a kind and a name, such as "reasoning-gym:chain_sum"; see `rollq env list`'
        )
    return kind, name


def kind_named(name: str) -> Kind:
    """The kind of this name. Raises `ConfigError`."""
    path = BUILT_IN.get(name)
    if path is not None:
        made: Kind = load_plugin("env", path, {})()
        return made
    found = next((point for point in _entry_points() if point.name == name), None)
    if found is None:
        known = kind_names()
        raise ConfigError(f"env: unknown kind {name!r}: use {', '.join(known)}{did_you_mean(name, known)}")
    added: Kind = found.load()()
    return added


def kind_names() -> list[str]:
    """All installed kinds."""
    return sorted({*BUILT_IN, *(point.name for point in _entry_points())})


def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))
