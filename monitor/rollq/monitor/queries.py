"""The result of a query, as a table or as JSON lines."""

from collections.abc import Sequence
from dataclasses import asdict

import orjson

from rollq.buffer.query.language import GroupRecord
from rollq.monitor.tables import aligned

WIDTH = 100
"""Width in characters to which a row is cut."""

_HEADER = ("task", "uid", "status", "staleness", "reward", "tries", "error")
_TEXT_COLUMNS = (0, 2, 6)


def as_lines(records: Sequence[GroupRecord]) -> list[str]:
    """One JSON object per group."""
    return [orjson.dumps(asdict(record)).decode() for record in records]


def as_table(records: Sequence[GroupRecord], *, more: bool) -> str:
    """One row per group, with its error at the end. `more` adds a line that says that there are further groups."""
    if not records:
        return "no groups"
    rows = [_HEADER, *map(_cells, records)]
    if not any(record.error for record in records):
        rows = [row[:-1] for row in rows]
    lines = [_cut(line) for line in aligned(rows, left=_TEXT_COLUMNS)]
    return "\n".join([*lines, *(["and more: see --limit and --count"] if more else [])])


def _cells(record: GroupRecord) -> tuple[str, ...]:
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    error = " ".join(record.error.split())
    return record.task, str(record.uid), record.status, str(record.staleness), reward, str(record.tries), error


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
