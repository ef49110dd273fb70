"""The answer to a query, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict

import orjson

from rollq.buffer.query.language import GroupRecord

WIDTH = 100
"""Columns that a row, with its error, is cut to."""

_HEADER = ("task", "uid", "status", "staleness", "reward", "tries")
_TEXTS = ("task", "status")


def as_lines(records: Sequence[GroupRecord]) -> list[str]:
    """One JSON object per group."""
    return [orjson.dumps(asdict(record)).decode() for record in records]


def as_table(records: Sequence[GroupRecord], *, more: bool) -> str:
    """A row per group, with its error at the end. `more`: there are others that are not shown."""
    if not records:
        return "no groups"
    rows = [_HEADER, *(_cells(record) for record in records)]
    columns = [
        [cell.ljust(width) if name in _TEXTS else cell.rjust(width) for cell in cells]
        for name, cells in zip(_HEADER, zip(*rows, strict=True), strict=True)
        for width in [max(len(cell) for cell in cells)]
    ]
    if any(record.error for record in records):
        columns.append(["error", *(" ".join(record.error.split()) for record in records)])
    lines = [_cut("  ".join(cells).rstrip()) for cells in zip(*columns, strict=True)]
    return "\n".join([*lines, *(["and more: see --limit and --count"] if more else [])])


def _cells(record: GroupRecord) -> tuple[str, ...]:
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    return record.task, str(record.uid), record.status, str(record.staleness), reward, str(record.tries)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
