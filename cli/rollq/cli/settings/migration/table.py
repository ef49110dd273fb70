"""Every setting of another system with its equivalent, from `xtuner.toml` or `trinity.toml`.

A file has a table for each class of settings, with an entry for each field:

- `field = "key"`, or `field = { is = "key", ... }`: the value is copied to this key of `rollq.toml`;
- `field = { by = ["key", ...], ... }`: code translates it to these keys;
- `field = { use = "...", ... }`: something other than a key does it: a command, a call, an option;
- `field = { table = "Class", ... }`: it has settings, which are in another table; with `named`, for each name;
- and in the table `none`, a reason with the fields that have no equivalent for this reason.

`default` is the other system's, where it differs from rollq's or is worth knowing; `note` says how the two differ. The
table `bases` has the class from which another inherits fields. A key is as `rollq settings` shows it, with `NAME` for
the name of a task.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

Kind = Literal["copied", "translated", "use", "table", "none"]
_KINDS: Final[Mapping[str, Kind]] = {"is": "copied", "by": "translated", "use": "use", "table": "table"}

ABSENT: Final = object()
"""The default of a setting without a default in the table."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of another system and its equivalent."""

    group: str
    name: str
    kind: Kind
    keys: tuple[str, ...] = ()
    text: str = ""
    """The replacement, the table's name, or the reason why there is no equivalent."""
    note: str = ""
    default: Any = ABSENT
    is_named: bool = False
    """For a table: whether it has tables by name."""

    @property
    def known_default(self) -> Any:
        """The default, or None without a default in the table."""
        return None if self.default is ABSENT else self.default


@dataclass(frozen=True, slots=True)
class System:
    """A system's settings, by class and name, and the version from which they were read."""

    name: str
    version: str
    groups: Mapping[str, Mapping[str, Setting]]
    bases: Mapping[str, str]

    def fields(self, group: str) -> dict[str, Setting]:
        """A class's settings by name, including inherited settings; none for an unknown class."""
        inherited = self.fields(self.bases[group]) if group in self.bases else {}
        return inherited | dict(self.groups.get(group, {}))


@cache
def system(name: Literal["xtuner", "trinity"]) -> System:
    """The table of a system."""
    data = tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text("utf-8"))
    bases = data.pop("bases", {})
    title, version = data.pop("system"), data.pop("version")
    return System(title, version, {group: _settings(group, table) for group, table in data.items()}, bases)


def _settings(group: str, table: dict[str, Any]) -> dict[str, Setting]:
    reasons = table.pop("none", {})
    settings = {name: _setting(group, name, entry) for name, entry in table.items()}
    for reason, names in reasons.items():
        settings |= {name: Setting(group, name, "none", text=reason) for name in names}
    return settings


def _setting(group: str, name: str, entry: str | dict[str, Any]) -> Setting:
    if isinstance(entry, str):
        return Setting(group, name, "copied", keys=(entry,))
    word = next(word for word in _KINDS if word in entry)
    value = entry[word]
    keys = (value,) if word == "is" else tuple(value) if word == "by" else ()
    text = "" if keys else value
    rest = entry.get("note", ""), entry.get("default", ABSENT), "named" in entry
    return Setting(group, name, _KINDS[word], keys, text, *rest)
