"""The order of prompts: the sequence in which a pass visits the rows, and which rows the pass takes.

Both are pure functions of plain numbers and of the statistics that Redis keeps about each prompt, so a producer holds
no state: after a restart, the same seed, cursor and statistics give the same prompts. The cursor counts positions in
the pass order, taken or not, so no order but `random` can lose or repeat a prompt within a pass.

The built-in orders use only integer arithmetic: numpy's generators may change between versions, and producers that
disagree would skip prompts.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from rollq.buffer.calls.replies.prompts import PromptStats
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.splitmix import splitmix64
from rollq.buffer.common.user_functions import PROMPT_ORDER, check_object
from rollq.buffer.errors import ConfigError
from rollq.producer.settings import ByColumn, ProducerTask

_MASK = 2**64 - 1
NumbersOf = Callable[[str], npt.NDArray[np.float64]]
LEAST_SHARE: Final = 0.1
"""The share of the passes in which order `difficulty` takes the easiest and the hardest prompts."""
RETRY_PASSES: Final = 5
"""The curriculum retries a prompt that it left out after this many passes."""


class PromptOrder(Protocol):
    """The order of a task's prompts. A custom class is constructed with the task's settings."""

    @property
    def uses_stats(self) -> bool:
        """Whether `takes` uses the statistics; if not, they are not read."""
        ...

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        """Each row number below `rows` once, int64 [rows], in the order of pass `number` (from 0)."""
        ...

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        """Whether pass `number` takes a row with these statistics, None for an untried row."""
        ...


class Shuffle:
    """All rows in every pass, in a different random order each time."""

    uses_stats: ClassVar[bool] = False
    repeats_rows: ClassVar[bool] = False

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return shuffled(rows, (*seeds, number))

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        return True


class FileOrder(Shuffle):
    """All rows in every pass, in file order."""

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return np.arange(rows, dtype=np.int64)


class Random(Shuffle):
    """Rows drawn at random with replacement: a pass has as many draws as there are rows."""

    repeats_rows: ClassVar[bool] = True

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return (_hashes(rows, (*seeds, number)) % np.uint64(rows)).astype(np.int64)


class SortedRows(Shuffle):
    """All rows in every pass, sorted by the numbers in a column. Rows with equal numbers stay in file order, and
    unreadable rows come last."""

    def __init__(self, numbers: npt.NDArray[np.float64], *, ascending: bool) -> None:
        self._order = np.argsort(numbers if ascending else -numbers, kind="stable")

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return self._order


class Difficulty(Shuffle):
    """Like `Shuffle`, but takes a prompt more often the closer its pass rate is to one half.

    A pass takes a prompt with probability 4 p (1 - p), the variance of its rewards relative to the largest variance,
    and at least `LEAST_SHARE`, because the policy changes. Untried prompts are always taken.
    """

    uses_stats: ClassVar[bool] = True

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        if stats is None or not stats.tries:
            return True
        share = max(LEAST_SHARE, 4 * stats.pass_rate * (1 - stats.pass_rate))
        return int(_hashes(1, (row, number))[0]) < share * 2**64


class Curriculum(Shuffle):
    """Like `Shuffle`, but leaves out prompts that have become too easy or are too hard.

    It takes untried prompts, and prompts with a pass rate from `curriculum_low` to `curriculum_high`. Because the
    policy changes, every other prompt is retried every `retry_passes` passes, a different part in each pass.
    """

    uses_stats: ClassVar[bool] = True

    def __init__(self, task: ProducerTask, retry_passes: int = RETRY_PASSES) -> None:
        self._task = task
        self._retry_passes = retry_passes

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        task = self._task
        if stats is None or not stats.tries:
            return True
        if task.curriculum_low <= stats.pass_rate <= task.curriculum_high:
            return True
        return (row + number) % self._retry_passes == 0


BUILT_IN: Final[Mapping[str, Callable[[ProducerTask], PromptOrder]]] = {
    "shuffle": lambda task: Shuffle(),
    "file": lambda task: FileOrder(),
    "random": lambda task: Random(),
    "difficulty": lambda task: Difficulty(),
    "curriculum": Curriculum,
}


def make_order(task: ProducerTask, numbers: NumbersOf) -> PromptOrder:
    """Create a task's order: built-in, by a column, or a custom class by dotted path.

    `numbers` returns the numbers in a column of the task's prompts. Raises `ConfigError`.
    """
    if isinstance(task.prompt_order, ByColumn):
        return SortedRows(numbers(task.prompt_order.by), ascending=task.prompt_order.ascending)
    order: Any = load_plugin("prompt order", task.prompt_order, BUILT_IN)(task)
    check_object(order, PROMPT_ORDER, task.prompt_order)
    if order.uses_stats and not task.prompt_stats:
        raise ConfigError(f"prompt order {task.prompt_order!r} needs statistics of every prompt, which are off")
    checked: PromptOrder = order
    return checked


def shuffled(rows: int, seeds: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A permutation of `rows` row numbers, int64 [rows], sorted by a hash of (seeds, row)."""
    return np.argsort(_hashes(rows, seeds), kind="stable")


def _hashes(rows: int, seeds: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """A hash of (seeds, row) for each row, uint64 [rows]."""
    state = 0
    for seed in seeds:
        state = int(splitmix64(np.array([(state + seed) & _MASK], np.uint64))[0])
    return splitmix64(np.arange(rows, dtype=np.uint64) + np.uint64(state))
