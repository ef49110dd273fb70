"""A judge for each row, chosen by a column: the table `judge` of a task. Pure.

The column's value selects a judge by name, a table such as `{ judge = "math", options = {} }`, or a list of these with
weights. A list's weighted rewards are added up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.common import exact_json
from rollq.buffer.common.columns import look_up
from rollq.buffer.settings_errors import changed_types, explain
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.judging.options import Part

FIELD: Final = "field"
"""The table's key for the name of the column."""
SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class JudgesByColumn:
    """For each value of a column, the parts of its judge, by their names in `reward_parts`."""

    field: str
    judges: Mapping[str, Mapping[str, Part]]

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> "JudgesByColumn":
        """Read the table. Raises `ValueError` with the key and its problem."""
        field = table.get(FIELD)
        if not isinstance(field, str) or not field:
            raise ValueError(f'{FIELD}: must name the column that chooses the judge, such as {FIELD} = "data_source"')
        judges = {value: _parts(value, given) for value, given in table.items() if value != FIELD}
        if not judges:
            raise ValueError(f'names no judge: add one for each value of the column {field!r}, such as math = "math"')
        return cls(field, judges)

    def value_of(self, prompt: Prompt) -> str:
        """The value that selects a prompt's judge. Raises `ValueError` if there is no judge."""
        found = look_up(prompt.metadata, self.field)
        known = f"there are judges for {', '.join(self.judges)}"
        if found is None:
            raise ValueError(f"no column {self.field!r} (judge.{FIELD}), which chooses the judge; {known}")
        value = found if isinstance(found, str) else exact_json.dumps(found).decode()
        if value not in self.judges:
            raise ValueError(f"{self.field} = {value!r:.{SHOWN}} has no judge; {known}")
        return value


def names_of(judge: str | Mapping[str, Any]) -> Iterator[str]:
    """The judges that the setting `judge` names. Raises `ValueError` for a wrong table."""
    if isinstance(judge, str):
        yield judge
        return
    for parts in JudgesByColumn.parse(judge).judges.values():
        yield from (part.judge for part in parts.values())


def _parts(value: str, given: Any) -> dict[str, Part]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return _named(value, [_part(value, given)])
    if not given:
        raise ValueError(f"{value} = []: must name a judge")
    return _named(value, [_part(f"{value}[{number}]", one) for number, one in enumerate(given)])


def _part(place: str, given: Any) -> Part:
    if not isinstance(given, str | Mapping):
        raise ValueError(f"{place} = {given!r:.{SHOWN}}: must be a judge's name in quotes, or a table")
    try:
        part = Part.model_validate({"judge": given} if isinstance(given, str) else given)
    except ValidationError as error:
        problem = explain(error, Part)[0]
        raise ValueError(place + (problem.removeprefix("judge") if isinstance(given, str) else f".{problem}")) from None
    if problem := next(changed_types(given, part), ""):
        raise ValueError(f"{place}.{problem}")
    return part


def _named(value: str, parts: Sequence[Part]) -> dict[str, Part]:
    named = {part.judge.rpartition(".")[2]: part for part in parts}
    if len(named) < len(parts):
        raise ValueError(
            f'{value}: several judges have the same name; use {{ judge = "weighted", options = {{ parts = ... }} }}, '
            "which names the parts"
        )
    return named
