"""Which prompt comes next. An order says in which order a pass takes the rows, and which of them it takes at all.

Both are pure functions of plain numbers and of what Redis keeps about each prompt, so that a producer holds no state of
its own: after a restart the same seed, cursor and statistics give the same prompts again. The cursor counts places of
the pass order, taken or passed over, so no order can lose a prompt or take one twice in a pass.

The orders are made of integer arithmetic alone: numpy does not promise the streams of its generators from one version
to the next, and two producers that disagree would skip prompts.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import ConfigError
from rollq.buffer.plugins import load_plugin
from rollq.buffer.replies import PromptStats
from rollq.producer.settings import ProducerTask

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class PromptOrder(Protocol):
    """The order of a task's prompts. One of your own is made with the task's settings."""

    @property
    def uses_stats(self) -> bool:
        """Whether `takes` looks at the statistics; they are fetched only then."""
        ...

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        """Every row number below `rows` once, int64 [rows], as pass `number` (from 0) shall take them."""
        ...

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        """Whether pass `number` takes a row, of which `stats` is known; None: it was never tried."""
        ...


class Shuffle:
    """All rows in every pass, shuffled anew for each."""

    uses_stats: ClassVar[bool] = False

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return shuffled(rows, (*seeds, number))

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        return True


class Curriculum(Shuffle):
    """Like `Shuffle`, without the prompts that are too easy or too hard by now.

    Taken are prompts that were tried less than `curriculum_tries` times, and those with a pass rate from
    `curriculum_low` to `curriculum_high`. Of the others each gets one more chance every `curriculum_retry_passes`
    passes, each pass another share of them: the policy changes, and only a new try can tell.
    """

    uses_stats: ClassVar[bool] = True

    def __init__(self, task: ProducerTask) -> None:
        self._task = task

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        task = self._task
        if stats is None or stats.tries < task.curriculum_tries:
            return True
        if task.curriculum_low <= stats.pass_rate <= task.curriculum_high:
            return True
        return task.curriculum_retry_passes > 0 and (row + number) % task.curriculum_retry_passes == 0


BUILT_IN: Final[Mapping[str, Callable[[ProducerTask], PromptOrder]]] = {
    "shuffle": lambda task: Shuffle(),
    "curriculum": Curriculum,
}


def make_order(task: ProducerTask) -> PromptOrder:
    """The order that a task names: a built-in one, or one's own class by dotted path. Raises `ConfigError`."""
    made: Any = load_plugin("prompt order", task.prompt_order, BUILT_IN)(task)
    missing = [name for name in ("uses_stats", "pass_order", "takes") if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"prompt order {task.prompt_order!r} has no {', '.join(missing)}")
    if made.uses_stats and not task.prompt_stats:
        raise ConfigError(f"prompt order {task.prompt_order!r} needs statistics of prompts: leave prompt_stats out")
    order: PromptOrder = made
    return order


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
