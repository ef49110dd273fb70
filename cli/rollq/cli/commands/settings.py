"""`rollq settings`: the keys of `rollq.toml`, with their meanings and defaults."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError

if TYPE_CHECKING:
    from rollq.cli.settings.reference import SettingsTable


@click.command("settings")
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="The advanced keys as well.")
def settings(key: str | None, everything: bool) -> None:
    """Show the keys of rollq.toml, with their meanings and defaults.

    Without KEY, shows the keys that most runs set. KEY is the name of a key or of a table.

    \b
    Example:
      rollq settings group_size
      rollq settings sampling
      rollq settings trainer.loss
    """
    from rollq.cli.settings.reference import engine_reference, reference

    tables = reference()
    if key is None:
        shown = [*tables, *engine_reference()] if everything else [_common(table) for table in tables]
        click.echo(_text(shown))
        return
    shown = _named(key, tables) or _named(key, tables := [*tables, *engine_reference()])
    if not shown:
        raise ConfigError(_absent(key, tables))
    click.echo(_text(shown))


def _absent(key: str, tables: "Sequence[SettingsTable]") -> str:
    if (reason := _removed(key, tables)) is not None:
        return f"{key}: no longer a setting: {reason}"
    keys = {setting.key for table in tables for setting in table.settings}
    close = difflib.get_close_matches(key.rpartition(".")[2], keys, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`rollq settings` shows the keys that most runs set"
    return f"no key or table is called {key!r}; {hint}"


def _named(name: str, tables: "Sequence[SettingsTable]") -> "list[SettingsTable]":
    """The tables with this name and all their keys, or the keys with this name and their tables."""
    name = re.sub(r"^evaluations\b", "tasks", name.strip("[]"))  # evaluations have the tables of tasks
    path, _, key = name.rpartition(".")
    if whole := [table for table in tables if _is_called(table.name, name)]:
        return whole
    parts = [_only(table, key) for table in tables if not path or _is_called(table.name, path)]
    return [part for part in parts if part.settings]


def _only(table: "SettingsTable", key: str) -> "SettingsTable":
    return replace(table, settings=tuple(setting for setting in table.settings if setting.key == key))


def _removed(name: str, tables: "Sequence[SettingsTable]") -> str | None:
    """The remedy for a key that one of the tables formerly had; None for any other key."""
    path, _, key = name.strip("[]").rpartition(".")
    called = (table for table in tables if not path or _is_called(table.name, path))
    return next((table.removed[key] for table in called if key in table.removed), None)


def _is_called(table: str, name: str) -> bool:
    """Whether this names a table: `tasks.NAME.sampling`, `tasks.math.sampling` or `sampling`."""
    words, asked = table.partition("]")[0].strip("[").split("."), name.split(".")
    if asked == words[:-1] and words[-1].isupper():
        return True
    return len(asked) <= len(words) and all(
        word == part or (word.isupper() and len(asked) == len(words) > 1)
        for word, part in zip(words[-len(asked) :], asked, strict=True)
    )


def _common(table: "SettingsTable") -> "SettingsTable":
    return replace(table, settings=tuple(setting for setting in table.settings if setting.is_common))


def _text(tables: "Sequence[SettingsTable]") -> str:
    width = min(shutil.get_terminal_size().columns, 110)
    lines: list[str] = []
    for table in tables:
        if not table.settings:
            continue
        lines += [table.name or "before the first table"]
        for setting in table.settings:
            default = setting.default if setting.default == "required" else f"default {setting.default}"
            lines.append(f"  {setting.key}  ({setting.kind}; {default})")
            lines += textwrap.wrap(setting.meaning, width, initial_indent="      ", subsequent_indent="      ")
        lines.append("")
    return "\n".join(lines).rstrip()
