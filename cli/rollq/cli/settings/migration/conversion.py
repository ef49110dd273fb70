"""Carries settings of another system over to a new `rollq.toml`, by the table of the system.

Invariant: every setting that the other file gives becomes a key or a comment, and a key is set only as the table says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rollq.cli.settings.migration.keys import default_of, field_at, is_only_evaluated
from rollq.cli.settings.migration.table import ABSENT, Setting, System
from rollq.cli.settings.migration.values import Made, Named, Placeholder, Unknown, shown
from rollq.cli.settings.migration.written import Path, Written

NOWHERE: Final = ()


@dataclass(slots=True)
class Given:
    """The settings of one class, as a file gives them, and where in the file."""

    group: str
    fields: Mapping[str, Any]
    where: str
    taken: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.fields


@dataclass(slots=True)
class Conversion:
    """The new file in the making, and how many settings have an equivalent."""

    system: System
    written: Written = field(default_factory=Written)
    converted: int = 0
    elsewhere: int = 0
    without: int = 0

    def take(self, given: Given, name: str) -> Any:
        """The value of a setting, or else the other system's default, or None. An unknown value counts as absent."""
        setting = self._setting(given, name)
        default = None if setting is None or setting.default is ABSENT else setting.default
        if name not in given.fields:
            return default
        value = given.fields[name]
        if name in given.taken:
            return default if isinstance(value, Unknown | Named) else value
        given.taken.add(name)
        if isinstance(value, Unknown | Named) and setting is not None and setting.kind != "table":
            self.without += 1
            keys = f"; set {' or '.join(setting.keys)}" if setting.keys else ""
            self.written.comment(_shown(given, name), f"known only when the file runs{keys}")
            return default
        self.converted += 1
        return value

    def put(self, given: Given, name: str, key: str, value: Any, at: Path = NOWHERE, note: str = "") -> None:
        """Set a key to a value that a setting became. `at` is the table of the task or evaluation."""
        setting = self._setting(given, name)
        assert key in (setting.keys if setting else ()), f"{given.group}.{name} has no entry for {key}"
        self.set(key, value, at, note, f"{given.where}{name}")

    def set(self, key: str, value: Any, at: Path = NOWHERE, note: str = "", why: str = "") -> None:
        """Set a key. `why` is the setting that asks for it, for a comment if the key cannot have the value."""
        if isinstance(value, Placeholder):
            note = f"{note + '; ' if note else ''}replace {value.text}: environment variables without a default"
            value = value.text
        value = _typed(key, value)
        path = located(key, at)
        because = _refusal(path, value)
        if because is None:
            self.written.put(path, value, note)
        elif because:
            self.written.comment(f"{why or '.'.join(path)} = {shown(value)}", f"none, because {because}")

    def copy(self, given: Given, at: Path = NOWHERE) -> None:
        """Copy every setting that the table says to copy, and defaults that differ from rollq's."""
        for name, setting in self.system.fields(given.group).items():
            if setting.kind != "copied" or name in given.taken:
                continue
            value, is_given = self.take(given, name), name in given.fields
            key = setting.keys[0]
            if value is not None and (is_given or value != default_of(key.replace("NAME", "x"))):
                self.put(given, name, key, value, at)

    def rest(self, given: Given) -> None:
        """Comments for everything that was not taken."""
        for name, value in given.fields.items():
            if name not in given.taken:
                given.taken.add(name)
                self._comment(given, name, value)

    def leave(self, given: Given, name: str, reason: str) -> None:
        """Say why a setting that was taken has no equivalent after all."""
        if name in given.fields:
            self.converted -= 1
            self.without += 1
            self.written.comment(_shown(given, name), f"none, because {reason}")

    def _setting(self, given: Given, name: str) -> Setting | None:
        return self.system.fields(given.group).get(name)

    def _comment(self, given: Given, name: str, value: Any) -> None:
        setting = self._setting(given, name)
        if setting is None:
            self.without += 1
            text = f"not known to rollq's table of {self.system.name} {self.system.version}"
        elif setting.kind == "table":
            self._below(given, setting, value)
            return
        elif setting.kind == "none":
            self.without += 1
            text = f"none, because {setting.text}"
        else:
            self.elsewhere += 1
            instead = setting.text if setting.kind == "use" else " or ".join(setting.keys)
            verb = "needs nothing in rollq" if instead == "nothing" else f"see {instead}"
            text = f"{verb}{f'; {setting.note}' if setting.note else ''}"
        self.written.comment(_shown(given, name), text)

    def _below(self, given: Given, setting: Setting, value: Any) -> None:
        """Comments for settings of a table that no key takes."""
        for where, item in _tables(f"{given.where}{setting.name}", setting, value):
            if isinstance(item, Made):
                self.rest(
                    Given(item.group if item.group in self.system.groups else setting.text, item.fields, f"{where}.")
                )
            elif isinstance(item, dict):
                self.rest(Given(setting.text, item, f"{where}."))
            elif item is not None:
                self.elsewhere += 1
                self.written.comment(f"{where} = {shown(item)}", setting.note or "its settings are unknown")


def _tables(where: str, setting: Setting, value: Any) -> list[tuple[str, Any]]:
    """The tables in the value of a setting, each with its place."""
    if isinstance(value, list):
        return [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    if setting.is_named and isinstance(value, dict):
        return [(f"{where}.{name}", item) for name, item in value.items()]
    return [(where, value)]


def _shown(given: Given, name: str) -> str:
    """A setting as the comments have it."""
    return f"{given.where}{name} = {shown(given.fields[name])}"


def located(key: str, at: Path) -> Path:
    """The place of a key: of a task, below its table."""
    parts = tuple(key.split("."))
    return (*at, *parts[2:]) if parts[0] == "tasks" else parts


def _typed(key: str, value: Any) -> Any:
    """A number as the key has it: 1 is true where that is meant, and 8.0 is 8."""
    field = field_at(key.replace("NAME", "x"))
    if field is None or field.annotation is None or not isinstance(value, int | float):
        return value
    try:
        typed = TypeAdapter(field.annotation).validate_python(value)
    except ValidationError:
        return value
    return typed if isinstance(typed, bool | int | float) else value


def _refusal(path: Path, value: Any) -> str | None:
    """Why a key cannot have a value; "" if the value says nothing that the key would; None if it can."""
    if is_only_evaluated(path):
        default = default_of(".".join(path))
        return (
            "" if value == default else "rollq's trainer computes logprobs without it, so only evaluations can have it"
        )
    if path[0] == "evaluations" and field_at(".".join((path[0], "x", *path[2:]))) is None:
        return ""
    return None if is_plain(value) else "it is known only when the file runs, or has no form in TOML"


def is_plain(value: Any) -> bool:
    """Whether TOML has this value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)
