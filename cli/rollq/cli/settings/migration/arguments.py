"""A function's arguments, which another system writes as a table in one of its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.readings import a_number
from rollq.cli.settings.migration.values import shown


@dataclass(slots=True)
class Arguments:
    """Arguments by name. `rest` turns an argument that no caller asked for into a comment."""

    run: Conversion
    given: Given
    setting: str
    values: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: Conversion, given: Given, setting: str) -> Self:
        """The arguments in a setting. Any value other than a table becomes a comment."""
        value = run.take(given, setting)
        if value is not None and not isinstance(value, dict):
            run.refuse(given, setting, "not a table")
        return cls(run, given, setting, value if isinstance(value, dict) else {})

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, of any type."""
        self.asked.add(name)
        return self.values.get(name, default)

    def number(self, name: str) -> float | None:
        """An argument that is a number. Any other value becomes a comment, and the default counts."""
        value = self.get(name)
        number = a_number(value)
        if value is not None and number is None:
            self.run.to_replace += 1
            self._comment(name, "not a number, so the default counts here; replace it")
        return number

    def rest(self, reason: str = "") -> None:
        """Add comments for all arguments that no caller asked for. `reason` says why they have no equivalent."""
        unknown = f"not known to rollq's table of {self.run.system.name} {self.run.system.version}"
        for name in self.values:
            if name not in self.asked:
                self.run.without += 1
                self._comment(name, f"none, because {reason}" if reason else unknown)
        self.asked.update(self.values)

    def _comment(self, name: str, text: str) -> None:
        place = f"{self.given.where}{self.setting}.{name}"
        self.run.written.comment(f"{place} = {shown(self.values[name])}", text)
