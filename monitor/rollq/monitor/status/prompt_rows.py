"""Accounts for the rows of a task's prompts: how many were read, used and left out. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from rollq.buffer.calls.replies.prompts import Unusable


class PromptRows(NamedTuple):
    """Numbers of rows: in a prompt file, and `read` by producers. The `used` rows became prompts, the `unusable` rows
    cannot be read as prompts, and the `too_long` rows have more tokens than `max_prompt_tokens`.
    """

    rows: int
    read: int
    used: int
    unusable: int
    too_long: int

    @classmethod
    def counted(cls, progress: Mapping[str, float]) -> "PromptRows | None":
        """The rows in a task's counters; None before a producer has read any row, and for tasks without prompts."""
        if "rows" not in progress:
            return None
        rows, read, unusable, too_long = (
            int(progress.get(name, 0)) for name in ("rows", "rows_read", "rows_unusable", "rows_too_long")
        )
        return cls(rows, read, max(0, read - unusable - too_long), unusable, too_long)


def described(rows: PromptRows, excluded: int = 0) -> str:
    """The account in a line: `640 of 1,000 rows read, 625 used, 12 unusable, 3 too long, 2 excluded`."""
    kinds = ((rows.unusable, "unusable"), (rows.too_long, "too long"), (excluded, "excluded"))
    left_out = [f"{n:,} {what}" for n, what in kinds if n]
    return ", ".join([f"{rows.read:,} of {rows.rows:,} rows read", f"{rows.used:,} used", *left_out])


def reasons(unusable: Mapping[str, Unusable]) -> str:
    """Why rows are unusable: `10 x no field 'answer', first p.jsonl:3; 2 x not JSON, first p.jsonl:9`."""
    return "; ".join(f"{rows.rows:,} x {reason}, first {rows.first}" for reason, rows in unusable.items())
