"""The endless run of prompts: what comes after a cursor, as a pure function of (order, seeds, cursor, statistics).

`cursor` counts the places of the order that were passed since the run began, taken or not; pass `cursor // rows` has an
order of its own, and the passes never end. It moves in Redis with the groups that it admits, so that two producers, or
one that starts again, neither lose a prompt nor take one twice. Each prompt becomes a group of `group_size` samples,
sample j of group g being (g, j): that is the buffer's part.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.replies import PromptStats
from rollq.buffer.rollouts import Prompt
from rollq.producer.prompt_order import PromptOrder, Shuffle

log = logging.getLogger(__name__)

_LOGGED_BAD_ROWS = 100  # a file that is bad throughout must not fill the disk with messages
_LOOK_AHEAD = 256  # rows whose statistics are asked for at once

Pick = tuple[Prompt, int]
"""A prompt, and the cursor after it."""

StatsOf = Callable[[Sequence[int]], Mapping[int, PromptStats]]
"""What is known of the prompts in these rows; `partial(buffer.prompt_stats, task)`."""


class PromptSource(Protocol):
    """Rows that can be turned into prompts, in any order."""

    @property
    def rows(self) -> int: ...

    def prompt(self, row: int) -> Prompt:
        """Raises `InvalidPrompt`."""
        ...


class Sampler:
    """Endless order over the rows of a source. `bad_rows` are those found unusable so far."""

    def __init__(
        self,
        source: PromptSource,
        seeds: tuple[int, ...],
        on_bad_prompt: Literal["skip", "fail"],
        order: PromptOrder | None = None,
        stats_of: StatsOf | None = None,
    ) -> None:
        """`order` is `Shuffle` by default; `stats_of` is needed by one that uses statistics."""
        self._source = source
        self._seeds = seeds
        self._on_bad_prompt = on_bad_prompt
        self._order = Shuffle() if order is None else order
        self._stats_of = stats_of
        self._cached: tuple[int, npt.NDArray[np.int64]] | None = None
        self._reported = 0  # the cursor up to which `_report` has told
        self._left_out = 0
        self._warned_pass = -1
        self.bad_rows: set[int] = set()

    def prompts_from(self, cursor: int, n: int) -> list[Pick]:
        """The next `n` usable prompts from `cursor` on that the order takes, each with the cursor after it.

        A pass of which it would take nothing takes all, with a warning. Raises `InvalidPrompt` for a bad row when
        `on_bad_prompt` is "fail", and when no row at all is usable; `ConfigError` for an order that is none.
        """
        found: list[Pick] = []
        number, position = divmod(cursor, self._source.rows)
        while len(found) < n:
            found += self._rest_of_pass(number, position, n - len(found))
            number, position = number + 1, 0
        self._report(cursor, found)
        return found

    def row_at(self, cursor: int) -> int:
        """Row that the order holds at `cursor`."""
        number, position = divmod(cursor, self._source.rows)
        return int(self._pass_order(number)[position])

    def _rest_of_pass(self, number: int, position: int, n: int) -> list[Pick]:
        """Up to `n` prompts of a pass, from a position on."""
        found = list(islice(self._picks(number, position, self._source.rows), n))
        if found or any(True for _ in self._picks(number, 0, position)):
            return found
        if number != self._warned_pass:
            self._warned_pass = number
            log.warning(
                "the order takes none of the %d prompts in pass %d, so the pass takes all: widen the band, "
                "or look at the judge: all prompts are too easy or too hard",
                self._source.rows,
                number,
            )
        return list(islice(self._picks(number, position, self._source.rows, every=True), n))

    def _picks(self, number: int, start: int, end: int, *, every: bool = False) -> Iterator[Pick]:
        """The usable prompts of a pass between two positions: those that the order takes, or `every` one."""
        order = self._pass_order(number)
        for first in range(start, end, _LOOK_AHEAD):
            rows: list[int] = order[first : min(first + _LOOK_AHEAD, end)].tolist()
            stats = {} if every else self._stats(rows)
            for place, row in enumerate(rows, number * self._source.rows + first):
                if every or self._order.takes(row, number, stats.get(row)):
                    prompt = self._usable(row)
                    if prompt is not None:
                        yield prompt, place + 1

    def _pass_order(self, number: int) -> npt.NDArray[np.int64]:
        if self._cached is None or self._cached[0] != number:
            rows = self._source.rows
            order = self._order.pass_order(rows, self._seeds, number)
            if not np.array_equal(np.sort(order), np.arange(rows)):
                raise ConfigError(
                    f"{type(self._order).__name__}.pass_order must give each of the {rows} rows once; to leave some "
                    "out of a pass is up to `takes`"
                )
            self._cached = (number, order)
        return self._cached[1]

    def _stats(self, rows: Sequence[int]) -> Mapping[int, PromptStats]:
        return self._stats_of(rows) if self._order.uses_stats and self._stats_of is not None else {}

    def _report(self, cursor: int, found: Sequence[Pick]) -> None:
        """Say at every new pass what was left out. The same places may be asked for again and again."""
        rows, start = self._source.rows, max(cursor, self._reported)
        end = found[-1][1] if found else start
        if end <= start:
            return
        self._left_out += end - start - sum(after > start for _, after in found)
        if end // rows > self._reported // rows:
            log.info(
                "pass %d over %d prompts begins; so far %d times one was passed over, and %d are unusable",
                end // rows,
                rows,
                self._left_out,
                len(self.bad_rows),
            )
        self._reported = end

    def _usable(self, row: int) -> Prompt | None:
        if row in self.bad_rows:
            return None
        try:
            return self._source.prompt(row)
        except InvalidPrompt as error:
            if self._on_bad_prompt == "fail":
                raise
            self.bad_rows.add(row)
            if len(self.bad_rows) == self._source.rows:
                raise InvalidPrompt(
                    f"none of the {self._source.rows} rows can be used; the last one: {error}"
                ) from error
            if len(self.bad_rows) <= _LOGGED_BAD_ROWS:
                log.warning("prompt skipped: %s", error)
            if len(self.bad_rows) == _LOGGED_BAD_ROWS:
                log.warning("further bad prompts are counted, not logged")
            return None
