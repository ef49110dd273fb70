"""Converts another system's settings to a new `rollq.toml`, by that system's table.

Invariant: every setting in the other file becomes a key or a comment, and only the table decides how a key is set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from rollq.cli.settings.migration.keys import default_of, field_at, is_only_evaluated
from rollq.cli.settings.migration.plain import without_unknown
from rollq.cli.settings.migration.readings import a_number, a_text, whole_number, yes_or_no
from rollq.cli.settings.migration.table import Setting, System
from rollq.cli.settings.migration.values import REST, Made, Placeholder, is_known, shown
from rollq.cli.settings.migration.written import Path, Written

NOWHERE: Final = ()
UNREAD: Final = "replace: known only when the file runs"
"""The comment above a key whose setting is in an unreadable table."""
Read = TypeVar("Read")


@dataclass(slots=True)
class Given:
    """One class's settings in a file, and their place in the file."""

    group: str
    fields: Mapping[str, Any]
    where: str
    taken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Settings with a value that is unknown or of another type."""

    def __contains__(self, name: str) -> bool:
        return name in self.fields


@dataclass(slots=True)
class Conversion:
    """The new file so far, and the number of settings with an equivalent."""

    system: System
    written: Written = field(default_factory=Written)
    converted: int = 0
    elsewhere: int = 0
    without: int = 0
    to_replace: int = 0
    """The number of settings with a value that is unknown or of another type."""
    unread: list[str] = field(default_factory=list)
    """Tasks that are known only when the file runs."""
    _around: list[int] = field(default_factory=list)

    def take(self, given: Given, name: str) -> Any:
        """A setting's value, or else the other system's default, or None. An unknown value counts as absent."""
        setting = self._setting(given, name)
        if name in given.fields and name not in given.taken:
            given.taken.add(name)
            if _is_readable(given.fields[name], setting):
                self.converted += 1
            else:
                self.refuse(given, name, "known only when the file runs")
        if name in given.fields and name not in given.refused:
            return given.fields[name]
        return None if setting is None else setting.known_default

    def whole(self, given: Given, name: str) -> int | None:
        """A setting's whole number. Any other value becomes a comment, and the default counts."""
        return self._read(given, name, whole_number, "not a whole number")

    def positive(self, given: Given, name: str) -> int | None:
        """A setting's whole number, or None for a number that is not above 0."""
        value = self.whole(given, name)
        return value if value is not None and value > 0 else None

    def number(self, given: Given, name: str) -> float | None:
        """A setting's number. Any other value becomes a comment, and the default counts."""
        return self._read(given, name, a_number, "not a number")

    def flag(self, given: Given, name: str) -> bool | None:
        """A setting's boolean. Any other value becomes a comment, and the default counts."""
        return self._read(given, name, yes_or_no, "neither true nor false")

    def word(self, given: Given, name: str) -> str | None:
        """A setting's string. Any other value becomes a comment, and the default counts."""
        return self._read(given, name, a_text, "not a string")

    def _read(self, given: Given, name: str, read: Callable[[Any], Read | None], problem: str) -> Read | None:
        value = self.take(given, name)
        found = read(value)
        if found is None and value is not None and name in given.fields and name not in given.refused:
            self.refuse(given, name, problem)
            found = read(self.take(given, name))
        return found

    def refuse(self, given: Given, name: str, problem: str) -> None:
        """Add a comment that the default counts in place of a value, which may have been taken."""
        setting = self._setting(given, name)
        if name in given.refused:
            return
        if name in given.taken and is_known(given.fields[name]):
            self.converted -= 1
        given.taken.add(name)
        given.refused.add(name)
        self.to_replace += 1
        keys = f"; replace {' or '.join(setting.keys)}" if setting is not None and setting.keys else ""
        self.written.comment(_shown(given, name), f"{problem}, so the default counts here{keys}")

    def put(self, given: Given, name: str, key: str, value: Any, at: Path = NOWHERE, note: str = "") -> None:
        """Set a key to a setting's converted value; None sets nothing. `at` is the table of a task or evaluation."""
        setting = self._setting(given, name)
        assert key in (setting.keys if setting else ()), f"{given.group}.{name} has no entry for {key}"
        if REST in given.fields and name not in given.fields:
            note = _joined(note, UNREAD)
        if value is not None:
            self.set(key, value, at, note, f"{given.where}{name}")

    def put_or_leave(self, given: Given, name: str, key: str, value: Any, reason: str) -> None:
        """Set a key to a setting's converted value; for None, record `reason`, why the setting has no equivalent."""
        if value is None:
            self.leave(given, name, reason)
        else:
            self.put(given, name, key, value)

    def set(self, key: str, value: Any, at: Path = NOWHERE, note: str = "", why: str = "") -> None:
        """Set a key. `why` is the setting behind the value, for a comment if the key cannot have the value."""
        if isinstance(value, Placeholder):
            note = _joined(note, f"replace {value.text}: environment variables without a default")
            value = value.text
        path = located(key, at)
        typed, asked = _typed(key, value), why or ".".join(path)
        if typed is _UNFIT:
            self.to_replace, self.converted = self.to_replace + 1, self.converted - 1
            text = f"not of the type of {'.'.join(path)}, so the default counts here; replace it"
            self.written.comment(f"{asked} = {shown(value)}", text)
            return
        value, left_out = without_unknown(typed)
        for place, item in left_out:
            self.to_replace += 1
            text = f"{''.join([asked, *map('[{!r}]'.format, place)])} = {shown(item)}"
            self.written.comment(text, "known only when the file runs, or without a form in TOML; replace it")
        because = _refusal(path, value)
        if because is None:
            self.written.put(path, value, note)
        elif because:
            self.written.comment(f"{asked} = {shown(value)}", f"none, because {because}")

    def copy(self, given: Given, at: Path = NOWHERE) -> None:
        """Copy every setting marked for copying in the table, and defaults that differ from rollq's."""
        for name, setting in self.system.fields(given.group).items():
            if setting.kind != "copied" or name in given.taken:
                continue
            value, is_given = self.take(given, name), name in given.fields
            key = setting.keys[0]
            if value is not None and (is_given or value != default_of(key.replace("NAME", "x"))):
                self.put(given, name, key, value, at)

    def rest(self, given: Given) -> None:
        """Add comments for all settings that were not taken."""
        if id(given.fields) in self._around:
            self.written.comment(given.where.removesuffix("."), "contains itself")
            return
        self._around.append(id(given.fields))
        for name, value in given.fields.items():
            if name == REST and name not in given.taken:
                self.to_replace += 1
                text = "known only when the file runs, so settings that it gives have their defaults here; replace them"
                self.written.comment(f"{given.where.removesuffix('.')}: {shown(value)}", text)
            elif name not in given.taken:
                self._comment(given, name, value)
            given.taken.add(name)
        self._around.pop()

    def leave(self, given: Given, name: str, reason: str) -> None:
        """Record why a setting that was taken has no equivalent after all."""
        if name in given.fields and name not in given.refused:
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
        """Add comments for a table's settings that no key takes."""
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


def _is_readable(value: Any, setting: Setting | None) -> bool:
    """Whether a value is known, or is a table whose settings may be known."""
    return is_known(value) or isinstance(value, Placeholder) or (setting is not None and setting.kind == "table")


def _tables(where: str, setting: Setting, value: Any) -> list[tuple[str, Any]]:
    """The tables in a setting's value, each with its place."""
    if isinstance(value, list):
        return [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    if setting.is_named and isinstance(value, dict):
        return [(f"{where}.{name}", item) for name, item in value.items()]
    return [(where, value)]


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _shown(given: Given, name: str) -> str:
    """A setting in the form for comments."""
    return f"{given.where}{name} = {shown(given.fields[name])}"


def located(key: str, at: Path) -> Path:
    """A key's place. A task's key is below the task's table."""
    parts = tuple(key.split("."))
    return (*at, *parts[2:]) if parts[0] == "tasks" else parts


_UNFIT: Final = object()
_NUMBERS: Final = frozenset({bool, int, float, type(None)})


def _typed(key: str, value: Any) -> Any:
    """A value in the key's type: 1 is true for a boolean, and 8.0 is 8. `_UNFIT` if the key needs a number."""
    annotation = getattr(field_at(key.replace("NAME", "x")), "annotation", None)
    if annotation is None or not isinstance(value, int | float | str):
        return value
    try:
        typed = TypeAdapter(annotation).validate_python(value, strict=value is True or None)
    except ValidationError:
        return _UNFIT if _leaves(annotation) <= _NUMBERS else value
    return typed if isinstance(typed, bool | int | float) else value


def _leaves(annotation: Any) -> set[Any]:
    """The types in an annotation."""
    inside = get_args(annotation)
    return set().union(*map(_leaves, inside)) if inside else {annotation}


def _refusal(path: Path, value: Any) -> str | None:
    """Why a key cannot have a value; "" if the value means nothing to the key; None if it can."""
    if is_only_evaluated(path):
        default = default_of(".".join(path))
        return (
            "" if value == default else "rollq's trainer computes logprobs without it, so only evaluations can have it"
        )
    if path[0] == "evaluations" and field_at(".".join((path[0], "x", *path[2:]))) is None:
        return ""
    return "" if value is None else None
