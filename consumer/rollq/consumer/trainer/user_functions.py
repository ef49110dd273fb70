"""User-written functions that the trainer calls: priorities of trained groups, and further metrics of evaluations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rollq.buffer.calls.evaluation_metrics import MetricFunction
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import EVALUATION_METRICS, PRIORITIES, Contract, check_function
from rollq.buffer.errors import ConfigError
from rollq.consumer.batches.batch import Batch
from rollq.consumer.trainer.observers import Observer, Update


@dataclass(frozen=True, slots=True)
class Priorities:
    """A function of a batch, and its path in `trainer.priorities`."""

    function: Callable[[Batch], Any]
    path: str

    def of(self, batch: Batch) -> list[float]:
        """One priority for each group of the batch. Raises `ConfigError` for any other number of them."""
        returned = self.function(batch)
        if not isinstance(returned, Iterable):
            raise ConfigError(
                f'[trainer] priorities = "{self.path}": it returned a {type(returned).__name__}, not priorities'
            )
        priorities = list(returned)
        if len(priorities) != len(batch.group_ids):
            raise ConfigError(
                f'[trainer] priorities = "{self.path}": it returned {len(priorities)} priorities for '
                f"{len(batch.group_ids)} groups"
            )
        return priorities


def load_priorities(path: str | None) -> Priorities | None:
    """The function at `path`; None without a path. Raises `ConfigError` if its signature is wrong."""
    return None if path is None else Priorities(_load(path, PRIORITIES), path)


def load_metric_function(path: str | None) -> MetricFunction | None:
    """The function at `path`; None without a path. Raises `ConfigError` if its signature is wrong."""
    return None if path is None else _load(path, EVALUATION_METRICS)


def _load(path: str, contract: Contract) -> Callable[..., Any]:
    function: Callable[..., Any] = load_plugin(contract.setting, path, {})
    check_function(function, contract, path)
    return function


class Prioritizer(Observer):
    """Prioritizes the groups of each batch after its update."""

    def __init__(
        self, priorities: Priorities, prioritize: Callable[[Sequence[tuple[str, int]], npt.ArrayLike], int]
    ) -> None:
        self._priorities = priorities
        self._prioritize = prioritize

    def on_update(self, update: Update) -> None:
        self._prioritize(update.batch.group_ids, self._priorities.of(update.batch))
