"""The answer to a query, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict

import orjson

from rollq.buffer.query import Record


def as_lines(records: Sequence[Record]) -> list[str]:
    """One JSON object per group."""
    return [orjson.dumps(asdict(record)).decode() for record in records]


def as_table(records: Sequence[Record], *, more: bool) -> str:
    """A row per group. `more`: there are others that are not shown."""
    rows = [("task", "uid", "status", "staleness", "arrival", "reward", "tries")]
    rows += [
        (
            one.task,
            str(one.uid),
            one.status,
            str(one.staleness),
            str(one.arrival),
            "-" if one.reward is None else f"{one.reward:.3f}",
            str(one.tries),
        )
        for one in records
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not records:
        return "no groups"
    return "\n".join([*lines, *(["and more: see --limit and --count"] if more else [])])
