"""Evaluates saved weights: a separate run, which trains nothing, evaluates one folder after another."""

import os
import re
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import click
from tqdm import tqdm

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError
from rollq.cli.run_location import RunLocation
from rollq.cli.settings.model import RollqSettings
from rollq.cli.up.evaluation_runs import EvaluationRuns
from rollq.cli.up.roles import RoleCommand, role_commands
from rollq.cli.up.run import grace_s
from rollq.cli.up.supervisor import RoleFailed, Supervisor, tail
from rollq.consumer.claims.connection import Connection
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings
from rollq.consumer.trainer.checkpoints import OPTIMIZER_FILE
from rollq.consumer.trainer.user_functions import load_metric_function
from rollq.monitor.text.tables import aligned

LOOK_S = 0.5
_STEP = re.compile(r"step-(\d+)")
_COUNT = re.compile(r"source/(.+)(?<!/parts)/count")
"""The metric that every data source has once; a data source's name may have slashes."""
_PASS = re.compile(r"pass@(\d+)")
_LEADING = ("reward", "count", "failed", "unfinished", "tokens")


class Evaluated(NamedTuple):
    """The metrics of one folder's weights, named as in `rollq.buffer.calls.evaluation_metrics`."""

    folder: Path
    metrics: dict[str, float]

    @property
    def step(self) -> int | None:
        """A checkpoint's train step, by its folder's name."""
        found = _STEP.fullmatch(self.folder.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of saved weights by `workers` workers on this machine, with its files in `folder`, which only the
    caller may use. `url` is the server started for the evaluation, None if it uses the settings' server.
    """

    settings: RollqSettings
    file: Path
    workers: int
    folder: Path
    url: str | None = None

    def run(self, weights: Sequence[Path]) -> Iterator[Evaluated]:
        """Yield each weights folder's metrics, one after another.

        Raises `RoleFailed` when a role cannot be kept running, and `ConfigError` when a role refuses its settings.
        """
        settings = self.settings.model_copy(update={"run": f"{self.settings.run[:40]}-eval-{secrets.token_hex(4)}"})
        environment = {**os.environ, "ROLLQ_RUN": settings.run}
        if self.url is not None:
            environment |= {"ROLLQ_REDIS_URL": self.url, "ROLLQ_QUEUE_URL": self.url}
            redis = settings.redis.model_copy(update={"buffer_url": self.url, "queue_url": self.url})
            settings = settings.model_copy(update={"redis": redis})
        location = RunLocation.from_settings(settings)
        runs = EvaluationRuns.at(location, self.folder, is_beside=self.url is not None)
        runs.delete_left(location)
        with (
            runs.opened(settings, location),
            Supervisor(self.folder / "logs", environment, grace_s=grace_s(settings)) as roles,
        ):
            for role in self._commands(settings):
                roles.start(role.name, role.command)
            if not self.workers:
                click.echo(f"waiting for workers: ROLLQ_RUN={settings.run} rollq work {self.file}")
            for number, folder in enumerate(weights, 1):
                yield Evaluated(folder, self._evaluate(location, folder, roles, f"{number} of {len(weights)}"))

    def _commands(self, settings: RollqSettings) -> Iterator[RoleCommand]:
        for role in role_commands(settings, self.file, self.workers):
            if role.name == "producer" or role.name.startswith("worker"):
                yield role

    def _evaluate(self, location: RunLocation, weights: Path, roles: Supervisor, title: str) -> dict[str, float]:
        stop, trainer = threading.Event(), self.settings.trainer
        function = load_metric_function(trainer.evaluation_metrics if trainer else None)
        with (
            Consumer.connect(
                Connection(location.buffer_url, location.run, password=location.password, payloads=location.payloads),
                weights=weights,
                settings=self._consumer_settings(),
                stop=stop,
            ) as consumer,
            ThreadPoolExecutor(1) as pool,
            closing(location.without_payloads()) as buffer,
        ):
            measuring = pool.submit(consumer.evaluate, detailed=True, function=function)
            try:
                self._watch(measuring, roles, buffer, f"{weights.name} ({title})")
            except BaseException:
                stop.set()
                raise
            return measuring.result()

    def _watch(self, measuring: "Future[dict[str, float]]", roles: Supervisor, buffer: Buffer, title: str) -> None:
        names = list(self.settings.evaluations)
        with tqdm(desc=title, unit=" prompts", leave=False, disable=None) as bar:
            while not wait_for([measuring], LOOK_S).done:
                for note in roles.restart_dead():
                    tqdm.write(note, file=sys.stderr)
                if stopped := [role for role in roles.roles if role.process is None]:
                    log_file = roles.log(stopped[0])
                    raise RoleFailed(f"{stopped[0].name} has stopped; the end of {log_file}:\n{tail(log_file)}")
                states = [state for name in names if (state := buffer.evaluation(name)) and state.is_running]
                bar.total, bar.n = sum(state.prompts for state in states), sum(state.finished for state in states)
                bar.refresh()

    def _consumer_settings(self) -> ConsumerSettings:
        trainer = self.settings.trainer
        base = trainer.consumer() if trainer else ConsumerSettings(transport="path")
        transport = "path" if base.transport == "nccl" else base.transport
        changed = {"transport": transport, "weights_dir": self.folder / "weights", "colocated": False, "takeover": True}
        return base.model_copy(update={**changed, "mode": "regenerate"})  # no batch is ever replayed


def check_weights(folders: Sequence[Path]) -> None:
    """Raise `ConfigError` for a folder without weights."""
    for folder in folders:
        if not any(file.name != OPTIMIZER_FILE for file in folder.glob("*.safetensors")):
            raise ConfigError(f"--weights {str(folder)!r}: the folder is missing, or has no *.safetensors")


def tables(results: Sequence[Evaluated], evaluations: Sequence[str]) -> Iterator[str]:
    """A table for each evaluation and data source, with a row for each folder of weights."""
    for name in evaluations:
        by_folder = [_below(f"eval/{name}/", result.metrics) for result in results]
        counts = map(_COUNT.fullmatch, chain.from_iterable(by_folder))
        yield name
        yield from _table(results, by_folder, "")
        for source in sorted({found[1] for found in counts if found}):
            yield f"{name}, {source}"
            yield from _table(results, by_folder, f"source/{source}/")


def _below(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def _table(results: Sequence[Evaluated], by_folder: Sequence[dict[str, float]], prefix: str) -> Iterator[str]:
    rows = [_below(prefix, metrics) for metrics in by_folder]
    columns = _columns(rows)
    cells = [["weights", *columns]]
    for result, row in zip(results, rows, strict=True):
        cells.append([result.folder.name, *(_cell(row.get(column)) for column in columns)])
    yield from ("  " + line for line in aligned(cells))


def _columns(rows: Iterable[dict[str, float]]) -> list[str]:
    """The metrics in rows, leading metrics first."""
    found = dict.fromkeys(key for key in chain.from_iterable(rows) if not key.startswith(("source/", "reward_")))
    return sorted(found, key=lambda key: _LEADING.index(key) if key in _LEADING else len(_LEADING))


def _cell(value: float | None) -> str:
    return "" if value is None else str(int(value)) if float(value).is_integer() and abs(value) > 1 else f"{value:.3g}"


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if nothing could be drawn to `path`."""
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {str(path)!r}: must be a .png file in a folder that exists")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'rollq[demo]'")


def plot(results: Sequence[Evaluated], evaluations: Sequence[str], path: Path) -> None:
    """Draw the mean reward, and pass@k for the largest k, of each evaluation over the folders of weights. Raises
    `ConfigError` if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [result.step for result in results if result.step is not None]
    by_step = len(set(steps)) == len(results)
    places = steps if by_step else list(range(len(results)))
    order = sorted(range(len(results)), key=places.__getitem__)
    for key in _drawn(results, evaluations):
        values = [results[index].metrics.get(key, float("nan")) for index in order]
        axes.plot([places[index] for index in order], values, marker="o", label=key.removeprefix("eval/"))
    if not by_step:
        axes.set_xticks(places, [result.folder.name for result in results], rotation=30, ha="right")
    axes.set_xlabel("train step" if by_step else "weights")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with writing_to("--plot", path):
        figure.savefig(path, dpi=150)


def _drawn(results: Sequence[Evaluated], evaluations: Sequence[str]) -> Iterator[str]:
    """The names of the metrics to draw."""
    for name in evaluations:
        names = {key.removeprefix(f"eval/{name}/") for result in results for key in result.metrics}
        yield f"eval/{name}/reward"
        if passes := [int(match[1]) for match in map(_PASS.fullmatch, names) if match]:
            yield f"eval/{name}/pass@{max(passes)}"
