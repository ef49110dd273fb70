"""The order of prompts: a pure function of (seeds, cursor), so that a producer holds no state of its own.

`cursor` counts the rows taken since the run began; pass `cursor // rows` over the file has its own shuffled order, and
the passes never end. The order is made of integer arithmetic alone: numpy does not promise the streams of its
generators from one version to the next, and two producers that disagree would skip prompts.
"""

import logging
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.schema import Prompt

log = logging.getLogger(__name__)

_LOGGED_BAD_ROWS = 100  # a file that is bad throughout must not fill the disk with messages
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class PromptSource(Protocol):
    """Rows that can be turned into prompts, in any order."""

    @property
    def rows(self) -> int: ...

    def prompt(self, row: int) -> Prompt:
        """Raises `InvalidPrompt`."""
        ...


class Sampler:
    """Endless seeded order over the rows of a source. `bad_rows` are those found unusable so far."""

    def __init__(self, source: PromptSource, seeds: tuple[int, ...], on_bad_prompt: Literal["skip", "fail"]) -> None:
        self._source = source
        self._seeds = seeds
        self._on_bad_prompt = on_bad_prompt
        self._cached: tuple[int, npt.NDArray[np.int64]] | None = None
        self.bad_rows: set[int] = set()

    def prompts_from(self, cursor: int, n: int) -> list[tuple[Prompt, int]]:
        """The next `n` usable prompts from `cursor` on, each with the cursor after it.

        Raises `InvalidPrompt` for a bad row when `on_bad_prompt` is "fail", and when no row at all is usable.
        """
        found: list[tuple[Prompt, int]] = []
        while len(found) < n:
            prompt = self._usable(self.row_at(cursor))
            cursor += 1
            if prompt is not None:
                found.append((prompt, cursor))
        return found

    def row_at(self, cursor: int) -> int:
        """Row that the order holds at `cursor`."""
        number, position = divmod(cursor, self._source.rows)
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, shuffled(self._source.rows, (*self._seeds, number)))
        return int(self._cached[1][position])

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


def shuffled(rows: int, seeds: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Permutation of `rows` row numbers, int64 [rows]: they are sorted by a hash of (seeds, row)."""
    state = 0
    for seed in seeds:
        state = int(_splitmix64(np.array([(state + seed) & _MASK], np.uint64))[0])
    keys = _splitmix64(np.arange(rows, dtype=np.uint64) + np.uint64(state))
    return np.argsort(keys, kind="stable")


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
