"""The result of a query, as a table or as JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rollq.buffer.query.language import GroupRecord
from rollq.monitor.text.tables import aligned
from rollq.monitor.text.terminal import cut, one_line

WIDTH = 100
"""Width of a row in characters; longer rows are cut."""

_HEADER = ("task", "uid", "status", "step", "staleness", "reward", "tries", "error")
_TEXT_COLUMNS = (0, 2, 7)


def as_lines(records: Sequence[GroupRecord]) -> list[str]:
    """One JSON object per group, in ASCII: an error may quote what a model wrote."""
    return [json.dumps(asdict(record), separators=(",", ":")) for record in records]


def as_table(records: Sequence[GroupRecord], *, more: bool) -> str:
    """One row per group, with its error at the end. `more` adds a line that says that there are further groups."""
    if not records:
        return "no groups"
    rows = [_HEADER, *map(_cells, records)]
    if not any(record.error for record in records):
        rows = [row[:-1] for row in rows]
    lines = [cut(line, WIDTH) for line in aligned(rows, left=_TEXT_COLUMNS)]
    return "\n".join([*lines, *(["and more: see --limit and --count"] if more else [])])


def _cells(record: GroupRecord) -> tuple[str, ...]:
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    step, numbers = "-" if record.step is None else str(record.step), (str(record.staleness), reward, str(record.tries))
    return record.task, str(record.uid), record.status, step, *numbers, one_line(record.error)
