"""A file's usable rows, which can be read as prompts. Other rows are counted by reason.

Invariant: a row is left out only with a visible reason, and a file with too many unusable rows stops the producer.
"""

import logging
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

import numpy as np

from rollq.buffer.calls.replies.prompts import Unusable, UnusableRow
from rollq.buffer.common.log_once import MAX_KEYS, LogOnce
from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.values.rollouts import Prompt

log = logging.getLogger(__name__)

ENOUGH_ROWS: Final = 1000
"""In a larger file, the share of unusable rows counts only after this many rows."""
MOST_REASONS: Final = 8
"""How many reasons are counted separately."""
MORE: Final = "other reasons"
REASON_CHARACTERS: Final = 100


class AllExcluded(InvalidPrompt):
    """All usable rows are excluded by hand."""


class PromptSource(Protocol):
    """Rows that can be read as prompts, in any order."""

    @property
    def rows(self) -> int:
        """Number of rows, usable or not."""
        ...

    @property
    def account(self) -> str:
        """The digest of the rows and of how they are read."""
        ...

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of row `row` (from 0). Raises `InvalidPrompt` for an unusable row."""
        ...

    def place(self, row: int) -> str:
        """A row's file and line, for messages."""
        ...


class UsableRows:
    """Reads the rows of a source as prompts. `seen` counts the rows read, `bad` holds the rows found unusable so far,
    and `reasons` holds the reasons. `unreported` holds the unusable rows that were not reported to the buffer yet.
    `excluded` holds the rows excluded by hand."""

    def __init__(self, source: PromptSource, max_bad_rows: float, count: int | None = None) -> None:
        """`max_bad_rows` is the share of rows that may be unusable; 1 means all but one. `count` is the number of rows
        to read from the source, by default all."""
        self.source = source
        self.count = source.rows if count is None else count
        self.bad: set[int] = set()
        self.excluded: frozenset[int] = frozenset()
        self.reasons: dict[str, Unusable] = {}
        self.unreported: list[UnusableRow] = []
        self.seen = 0
        self._max_bad_rows = max_bad_rows
        self._is_seen = np.zeros(source.rows, np.bool_)
        self._log_once = LogOnce(log)

    def prompt(self, row: int) -> Prompt | None:
        """Return a row's prompt, or None for an unusable or excluded row; the first unusable rows are logged.

        Raises `InvalidPrompt` if no row is usable or more than `max_bad_rows` are unusable; `AllExcluded` if all usable
        rows are excluded.
        """
        if row in self.bad or row in self.excluded:
            return None
        self.seen += not self._is_seen[row]
        self._is_seen[row] = True
        try:
            return self.source.prompt(row)
        except InvalidPrompt as error:
            self._refuse(row, error)
            return None

    def prompts_from(self, start: int, n: int) -> list[Prompt]:
        """Up to `n` usable prompts in file order, from usable prompt number `start` (from 0) on.

        Raises `InvalidPrompt` under the same conditions as `prompt`.
        """
        prompts = (prompt for row in range(self.count) if (prompt := self.prompt(row)) is not None)
        return list(islice(prompts, start, start + n))

    def leave_out(self, rows: Iterable[int]) -> None:
        """Stop reading these rows. Raises `InvalidPrompt` if no row is usable."""
        self.bad.update(rows)
        if len(self.bad) >= self.count:
            raise InvalidPrompt(
                f"none of the {self.count} rows is usable; the last rows are longer than max_prompt_tokens: raise it, "
                "or fix the file"
            )

    def exclude(self, rows: Iterable[int]) -> None:
        """Exclude these rows and no others: rows that were excluded before are included again."""
        self.excluded = frozenset(rows)

    def check_some_are_left(self) -> None:
        """Raise `AllExcluded` if no readable row is left."""
        if len(self.bad | self.excluded) >= self.count:
            raise AllExcluded(
                f"no row is left: {len(self.bad)} of {self.count} cannot be used, and the others are excluded by hand"
            )

    def described(self) -> str:
        """The reasons, the most frequent first: `12 x no field 'answer' (first p.jsonl:3)`."""
        by_count = sorted(self.reasons.items(), key=lambda item: -item[1].rows)
        return "; ".join(f"{unusable.rows} x {reason} (first {unusable.first})" for reason, unusable in by_count)

    def _check_share(self, error: InvalidPrompt) -> None:
        """Raise `InvalidPrompt` if too many of the rows read are unusable; `error` is the last row's error."""
        unusable = sum(of_reason.rows for of_reason in self.reasons.values())
        if unusable > self._max_bad_rows * max(self.seen, min(self.count, ENOUGH_ROWS)):
            raise InvalidPrompt(
                f"{unusable} of the {self.seen} rows that were read are unusable, more than max_bad_rows = "
                f"{self._max_bad_rows:g} allows: {self.described()}. Fix these rows, or raise max_bad_rows to leave "
                f"them out. The last error: {error}"
            ) from error

    def _refuse(self, row: int, error: InvalidPrompt) -> None:
        if self._max_bad_rows == 0:
            raise error
        self.bad.add(row)
        place = self.source.place(row)
        reason = str(error).removeprefix(f"{place}: ").partition(";")[0][:REASON_CHARACTERS]
        self.unreported.append(UnusableRow(row, reason, place))
        reason = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else MORE
        so_far = self.reasons.get(reason, Unusable(0, place))
        self.reasons[reason] = Unusable(so_far.rows + 1, so_far.first)
        if len(self.bad) >= self.count:
            raise InvalidPrompt(f"none of the {self.count} rows is usable; the last error: {error}") from error
        self.check_some_are_left()
        self._check_share(error)
        self._log_once.warning(row, "prompt skipped: %s", error)
        if len(self.bad) == MAX_KEYS:
            log.warning("further bad prompts are counted, not logged")
