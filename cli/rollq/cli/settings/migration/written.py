"""The new `rollq.toml`: keys with values and notes, and comments for settings that have no key."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import Any, Final

from rollq.cli.settings.migration.names import plain_name
from rollq.cli.settings.task_tables import MAIN, SUBTABLES
from rollq.consumer.settings import TrainerSettings
from rollq.workers.settings import WorkerSettings

Path = tuple[str, ...]
"""A key's place: `("tasks", "math", "sampling", "top_p")`."""

WIDTH: Final = 110
_FIRST: Final = (("run",), ("seed",))
_ORDER: Final = ("tasks", "batch", "evaluations", "producer", "worker", "trainer")
_OPTIONS: Final = ("worker", "options")
_BELOW: Final = ("options", "loss", "advantages", "lora", "wandb", "mlflow")
"""Tables below `[worker]` and `[trainer]`, which have a header; the keys of other tables are dotted:
`rows.prompt_field`."""


@dataclass(slots=True)
class Written:
    """The content of the new file, in the order of insertion."""

    values: dict[Path, Any] = field(default_factory=dict)
    notes: dict[Path, list[str]] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    """Explanation -> settings that have no key for this reason."""

    def put(self, path: Path, value: Any, note: str = "") -> None:
        """Set a key. A second note for a key is added to the first. The options of the engine have a table."""
        if path == _OPTIONS:
            self.values |= {(*path, name): option for name, option in value.items()}
            return
        self.values[path] = value
        if note:
            self.note(path, note)

    def note(self, path: Path, note: str) -> None:
        """Add a comment above a key."""
        notes = self.notes.setdefault(path, [])
        if note not in notes:
            notes.append(note)

    def comment(self, setting: str, text: str) -> None:
        """Add a setting to the comments at the end. Settings with the same text share a line."""
        settings = self.comments.setdefault(text, [])
        if setting not in settings:
            settings.append(setting)

    def drop(self, path: Path, reason: str) -> None:
        """Turn a key into a comment."""
        value = self.values.pop(path)
        self.notes.pop(path, None)
        self.comment(f"{'.'.join(path)} = {toml(value)}", f"left out, because rollq refuses it: {reason}")

    def data(self) -> dict[str, Any]:
        """The file's content, in the form that a TOML reader returns."""
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            table = tree
            for part in path[:-1]:
                table = table.setdefault(part, {})
            table[path[-1]] = value
        return tree

    def text(self, *heads: str) -> str:
        """The file's text. `heads` holds the comments at its top."""
        lines = list(chain.from_iterable(map(_comment, heads)))
        lines += chain.from_iterable(self._lines(path, *path) for path in _FIRST if path in self.values)
        for table in sorted(set(map(_table, self.values)).difference(_FIRST), key=self._place):
            lines += self._section(table)
        if self.comments:
            lines += ["", "# Without a key in rollq.toml:"]
        for text, settings in self.comments.items():
            lines += _comment(f"{'; '.join(settings)}: {text}", indent="#   ")
        return "\n".join(lines) + "\n"

    def _section(self, table: Path) -> list[str]:
        paths = sorted((path for path in self.values if _table(path) == table), key=_rank)
        keys = [line for path in paths for line in self._lines(path, ".".join(map(_key, path[len(table) :])))]
        return ["", f"[{'.'.join(map(_key, table))}]", *keys]

    def free_name(self, title: str) -> str:
        """A name like `title` that no task or evaluation has yet."""
        name, names = plain_name(title), {path[1] for path in self.values if path[0] in ("tasks", "evaluations")}
        while name in names:
            name += "-2"
        return name

    def tasks(self) -> list[Path]:
        """The tasks' places."""
        return list(dict.fromkeys(path[:2] for path in self.values if path[0] == "tasks"))

    def _lines(self, path: Path, name: str) -> list[str]:
        notes = [line for note in self.notes.get(path, ()) for line in _comment(note)]
        return [*notes, f"{name} = {toml(self.values[path])}"]

    def _place(self, table: Path) -> tuple[int, int]:
        if len(table) == 1 or table[0] in ("worker", "trainer"):
            return _ORDER.index(table[0]), 1 + _BELOW.index(table[1]) if table[1:] else 0
        return _ORDER.index(table[0]), next(place for place, path in enumerate(self.values) if _table(path) == table)


def _table(path: Path) -> Path:
    """The table under whose header a key is written."""
    has_head = path[0] in ("tasks", "evaluations") or (len(path) > 2 and path[1] in _BELOW)
    return path[:2] if has_head else path[:1]


_TASK: Final[list[Path]] = [(key,) for key in MAIN] + [
    (table, key) for table, keys in SUBTABLES.items() for key in keys
]
_KEYS: Final[Mapping[str, list[Path]]] = {
    "trainer": [(key,) for key in ("model", "output", "steps", *TrainerSettings.model_fields)],
    "worker": [(key,) for key in WorkerSettings.model_fields],
    "tasks": _TASK,
    "evaluations": _TASK,
}


def _rank(path: Path) -> int:
    """A key's rank in its table, in the order of `rollq settings`."""
    keys, key = _KEYS.get(path[0], []), path[len(_table(path)) :]
    return keys.index(key) if key in keys else len(keys)


def _comment(text: str, indent: str = "# ") -> list[str]:
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent[:2], subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _key(part: str) -> str:
    plain = part.replace("_", "").replace("-", "")
    return part if plain.isascii() and plain.isalnum() else toml(part)


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str | PurePath):
        text = str(value).encode("utf-8", "replace").decode("utf-8")
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"{type(value).__name__} has no TOML")
