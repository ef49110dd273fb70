"""The trackers of one trainer, behind two calls that always return at once."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ConfigError
from rollq.consumer.batches.batch import Batch
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trackers.host import TrackerHost
from rollq.consumer.trackers.rollouts import sampled_rollouts
from rollq.consumer.trackers.tracker import Entry, Rollout, Tracker, scalars

log = logging.getLogger(__name__)

CLOSE_WITHIN_S = 20.0
"""How long all trackers together may take to write their remaining entries."""


class Trackers:
    """Reports to the trackers of `[trainer] trackers`. The end of `with` closes them, in bounded time."""

    def __init__(self, settings: TrainerSettings, run: str, first_step: int, seed: int, *, on: bool = True) -> None:
        """`first_step` is trained first; `seed` decides which rollouts are shown. Without `on`, nothing is reported."""
        self._rollouts, self._seed = settings.tracked_rollouts, seed
        self._log_once = LogOnce(log)
        makers = _makers(settings, run, first_step)
        self._hosts = [TrackerHost(name, makers[name]) for name in (settings.trackers if on else ())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for host in self._hosts:
            host.end()
        deadline_s = time.monotonic() + CLOSE_WITHIN_S
        for host in self._hosts:
            host.join(max(0.0, deadline_s - time.monotonic()))

    @property
    def lost(self) -> Mapping[str, Mapping[str, int]]:
        """Tracker -> how many entries were dropped and how many failed, for trackers that lost entries."""
        return {
            host.name: {"dropped": host.dropped, "failed": host.failed}
            for host in self._hosts
            if host.dropped or host.failed
        }

    def log_step(self, line: Mapping[str, Any], batch: Batch) -> None:
        """Report a step: its metrics line, and some rollouts of its batch."""
        if self._hosts:
            self._log(Entry(line["step"], dict(scalars(line)), self._shown(batch)))

    def log_evaluation(self, line: Mapping[str, Any]) -> None:
        """Report an evaluation."""
        self._log(Entry(line["step"], dict(scalars(line, "evaluation/"))))

    def _shown(self, batch: Batch) -> list[Rollout]:
        try:
            return sampled_rollouts(batch, self._rollouts, self._seed)
        except Exception as error:  # noqa: BLE001 - user code made the samples, and training must continue
            self._log_once.warning(type(error), "trackers show no rollouts of step %d", batch.step, exc_info=error)
            return []

    def _log(self, entry: Entry) -> None:
        for host in self._hosts:
            host.log(entry)


def check_packages(settings: TrainerSettings) -> None:
    """Raise `ConfigError` for a tracker whose package is missing."""
    for name in settings.trackers:
        if find_spec(name) is None:
            raise ConfigError(f"[trainer] trackers: {name!r} needs the package {name!r}: pip install 'rollq[{name}]'")


def _makers(settings: TrainerSettings, run: str, first_step: int) -> dict[str, Callable[[], Tracker]]:
    return {
        "tensorboard": partial(_tensorboard, settings, first_step),
        "wandb": partial(_wandb, settings, run),
        "mlflow": partial(_mlflow, settings, run),
    }


def _tensorboard(settings: TrainerSettings, first_step: int) -> Tracker:
    from rollq.consumer.trackers.tensorboard import TensorBoard

    return TensorBoard(settings.tensorboard.folder or settings.output / "tensorboard", first_step)


def _wandb(settings: TrainerSettings, run: str) -> Tracker:
    from rollq.consumer.trackers.wandb import Wandb

    return Wandb(settings.wandb, settings.output, run)


def _mlflow(settings: TrainerSettings, run: str) -> Tracker:
    from rollq.consumer.trackers.mlflow import Mlflow

    return Mlflow(settings.mlflow, run)
