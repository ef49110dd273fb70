"""Gives the groups of each trained batch their priorities for later draws, by a function of the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import PRIORITIES, check_function
from rollq.buffer.errors import ConfigError
from rollq.consumer.batches.batch import Batch
from rollq.consumer.trainer.observers import Observer, Update


@dataclass(frozen=True, slots=True)
class Priorities:
    """A function of a batch, and the path that `trainer.priorities` names it by."""

    function: Callable[[Batch], Any]
    path: str

    def of(self, batch: Batch) -> list[float]:
        """One priority for each group of the batch. Raises `ConfigError` if the function gives others."""
        priorities = list(self.function(batch))
        if len(priorities) != len(batch.group_ids):
            raise ConfigError(
                f'[trainer] priorities = "{self.path}": it gave {len(priorities)} priorities for '
                f"{len(batch.group_ids)} groups"
            )
        return priorities


def load_priorities(path: str | None) -> Priorities | None:
    """The function that `path` leads to; None without one. Raises `ConfigError` for one that cannot be called so."""
    if path is None:
        return None
    function: Callable[[Batch], Any] = load_plugin("priorities", path, {})
    check_function(function, PRIORITIES, path)
    return Priorities(function, path)


class Prioritizer(Observer):
    """Prioritizes the groups of each batch once the weights have learned from it."""

    def __init__(
        self, priorities: Priorities, prioritize: Callable[[Sequence[tuple[str, int]], npt.ArrayLike], int]
    ) -> None:
        self._priorities = priorities
        self._prioritize = prioritize

    def on_update(self, update: Update) -> None:
        self._prioritize(update.batch.group_ids, self._priorities.of(update.batch))
