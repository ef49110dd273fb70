"""The endless sequence of prompts: the prompts after a cursor, as a pure function of (order, seeds, cursor,
statistics).

`cursor` counts the positions in the order that have been passed since the run started, taken or not. Pass `cursor //
rows` has a separate order, and the passes never end. The cursor moves in Redis together with the admitted groups, so
several producers, or a restarted producer, neither lose nor repeat a prompt.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from rollq.buffer.calls.replies.prompts import PromptStats
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt
from rollq.producer.progress_log import PassLog
from rollq.producer.prompt_order import PromptOrder, Shuffle
from rollq.producer.usable_rows import PromptSource, UsableRows

log = logging.getLogger(__name__)

_ROWS_PER_READ = 256  # rows whose statistics are read at once

Pick = tuple[Prompt, int]
"""A prompt, and the cursor after it."""

StatsOf = Callable[[Sequence[int]], Mapping[int, PromptStats]]
"""Returns the statistics of these rows' prompts, as `partial(buffer.prompt_stats, task)` does."""


class Sampler:
    """Picks prompts from the usable `rows` of a source, pass after pass."""

    def __init__(
        self,
        source: PromptSource,
        seeds: tuple[int, ...],
        max_bad_rows: float,
        order: PromptOrder | None = None,
        stats_of: StatsOf | None = None,
        *,
        number: int = 1,
        shards: int = 1,
        passes: int | None = None,
    ) -> None:
        """`UsableRows` describes `max_bad_rows`. `order` defaults to `Shuffle`; `stats_of` is required by an order that
        uses statistics.

        With several `shards` of the same source, seeds and order, shard `number` (from 1) takes the rows whose number
        is `number - 1` modulo `shards`, in the common order. Each shard needs a row. Prompts end after `passes`; by
        default, they never end.
        """
        self._source = source
        self._shard, self._shards = number - 1, shards
        self._count = len(range(self._shard, source.rows, shards))
        self._seeds = seeds
        self.passes = passes
        self._order = Shuffle() if order is None else order
        self._stats_of = stats_of
        self._cached: tuple[int, npt.NDArray[np.int64]] | None = None
        self._pass_log = PassLog(self._count)
        self._warned_pass = -1
        self.rows = UsableRows(source, max_bad_rows, self._count)

    def prompts_from(self, cursor: int, n: int) -> list[Pick]:
        """Return the next `n` usable prompts from `cursor` that the order takes, each with the cursor after it.

        At the end of the last pass, there are fewer. A pass in which the order takes no prompt takes every prompt, with
        a warning. Raises `InvalidPrompt` if too many rows are unusable; `ConfigError` for an invalid order.
        """
        picks: list[Pick] = []
        number, position = divmod(cursor, self._count)
        while len(picks) < n and (self.passes is None or number < self.passes):
            picks += self._rest_of_pass(number, position, n - len(picks))
            number, position = number + 1, 0
        self._pass_log.note(cursor, [after for _, after in picks], len(self.rows.bad))
        return picks

    def _rest_of_pass(self, number: int, position: int, n: int) -> list[Pick]:
        """Up to `n` prompts of a pass, starting at a position."""
        picks = list(islice(self._picks(number, position, self._count), n))
        if picks or any(True for _ in self._picks(number, 0, position)):
            return picks
        if number != self._warned_pass:
            self._warned_pass = number
            log.warning(
                "the order takes none of the %d prompts in pass %d, so the pass takes all of them; all are too easy or "
                "too hard: check the judge or, with the curriculum, its low and high",
                self._count,
                number,
            )
        return list(islice(self._picks(number, position, self._count, every=True), n))

    def _picks(self, number: int, start: int, end: int, *, every: bool = False) -> Iterator[Pick]:
        """A pass's usable prompts between two positions: the order's choice or, with `every`, all."""
        for row, after in self._rows(number, start, end, every):
            prompt = self.rows.prompt(row)
            if prompt is not None:
                yield prompt, after

    def _rows(self, number: int, start: int, end: int, every: bool) -> Iterator[tuple[int, int]]:
        """A pass's taken rows between two positions, each with the cursor after it."""
        order = self._pass_order(number)
        for first in range(start, end, _ROWS_PER_READ):
            rows: list[int] = order[first : min(first + _ROWS_PER_READ, end)].tolist()
            stats = {} if every else self._stats(rows)
            for after, row in enumerate(rows, number * self._count + first + 1):
                if every or self._order.takes(row, number, stats.get(row)):
                    yield row, after

    def _pass_order(self, number: int) -> npt.NDArray[np.int64]:
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, self._rows_of_pass(number))
        return self._cached[1]

    def _rows_of_pass(self, number: int) -> npt.NDArray[np.int64]:
        if getattr(self._order, "repeats_rows", False):
            drawn = self._order.pass_order(self._count, (*self._seeds, self._shard), number)
            return np.asarray(drawn * self._shards + self._shard, np.int64)
        rows = self._source.rows
        order: npt.NDArray[np.int64] = self._order.pass_order(rows, self._seeds, number)
        if not np.array_equal(np.sort(order), np.arange(rows)):
            raise ConfigError(
                f"{type(self._order).__name__}.pass_order must give each of the {rows} rows once; `takes` decides "
                "which of them a pass leaves out"
            )
        return np.asarray(order[order % self._shards == self._shard], np.int64)

    def _stats(self, rows: Sequence[int]) -> Mapping[int, PromptStats]:
        return self._stats_of(rows) if self._order.uses_stats and self._stats_of is not None else {}
