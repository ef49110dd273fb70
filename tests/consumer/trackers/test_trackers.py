"""The reference trainer with trackers: real ones get its numbers, and broken ones cost it nothing."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.buffer.errors import ConfigError
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trackers import trackers
from rollq.consumer.trackers.host import MOST_WAITING, TrackerHost
from rollq.consumer.trackers.tracker import Entry
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from rollq.consumer.trainer.trainer import train
from support.fed_trainer import fed
from support.waiting import PATIENCE_S

STEPS = 4


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSettings]:
    def make(**changed: object) -> TrainerSettings:
        values = {"model": model_folder, "output": tmp_path / "out", "steps": STEPS, "timeout_s": PATIENCE_S}
        return TrainerSettings.model_validate({**values, "micro_batch_tokens": 64, **changed})

    return make


def lines(settings: TrainerSettings) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (settings.output / METRICS_FILE).read_bytes().splitlines()]


class Keeping:
    """A tracker that keeps its entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def log(self, entry: Entry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        pass


class Broken(Keeping):
    """A tracker that raises or hangs at one point."""

    def __init__(self, point: str, do: Callable[[], object]) -> None:
        super().__init__()
        self._point, self._do = point, do
        self._at("start")

    def log(self, entry: Entry) -> None:
        self._at("log")
        super().log(entry)

    def close(self) -> None:
        self._at("close")

    def _at(self, point: str) -> None:
        if point == self._point:
            self._do()


@pytest.fixture
def hang() -> Iterator[Callable[[], object]]:
    over = threading.Event()
    yield over.wait
    over.set()


def fail() -> None:
    raise RuntimeError("out of order")


def test_a_tracker_gets_the_numbers_of_the_metrics_and_some_rollouts(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Keeping()
    monkeypatch.setattr(trackers, "_makers", lambda *_: {"wandb": lambda: kept})
    chosen = settings(trackers=["wandb"], tracked_rollouts=3)
    with fed(server_url, run_name, tmp_path / "worker"):
        assert train(Connection(server_url, run_name), chosen) == STEPS
    found = lines(chosen)
    assert [entry.step for entry in kept.entries] == [line["step"] for line in found] == list(range(1, STEPS + 1))
    for entry, line in zip(kept.entries, found, strict=True):
        for name in ("reward", "loss", "tokens", "gradient_norm", "wait_s", "train_s", "clip_fraction"):
            assert entry.scalars[name] == line[name]
        assert entry.scalars["rewards/math"] == line["rewards"]["math"]
        assert entry.scalars["mismatch/mean"] == line["mismatch"]["mean"]
        assert len(entry.rollouts) == 3
        assert {rollout.task for rollout in entry.rollouts} == {"math"}
        assert all(rollout.prompt.startswith("prompt ") for rollout in entry.rollouts)
        assert "trackers" not in line
    assert not any("worker" in name or "version" in name for name in kept.entries[0].scalars)


@pytest.mark.long
@pytest.mark.parametrize("failure", ["raise", "hang"])
@pytest.mark.parametrize("point", ["start", "log", "close"])
def test_a_run_ends_as_without_trackers_when_one_is_broken_and_the_other_one_gets_all(
    point: str,
    failure: str,
    hang: Callable[[], object],
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, do = Keeping(), fail if failure == "raise" else hang
    makers = {"wandb": lambda: Broken(point, do), "mlflow": lambda: kept}
    monkeypatch.setattr(trackers, "_makers", lambda *_: makers)
    monkeypatch.setattr(trackers, "CLOSE_WITHIN_S", 0.5)
    most_waiting = {"wandb": 1, "mlflow": MOST_WAITING}
    monkeypatch.setattr(
        trackers, "TrackerHost", lambda name, make: TrackerHost(name, make, most_waiting=most_waiting[name])
    )
    chosen = settings(trackers=["mlflow", "wandb"])
    with fed(server_url, run_name, tmp_path / "worker"):
        assert train(Connection(server_url, run_name), chosen) == STEPS
    found = lines(chosen)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [entry.step for entry in kept.entries] == list(range(1, STEPS + 1))
    if point != "close":
        lost = found[-1]["trackers"]
        assert set(lost) == {"wandb"}
        assert lost["wandb"]["failed"] + lost["wandb"]["dropped"] >= 1


def test_a_missing_package_is_named_before_anything_starts(
    settings: Callable[..., TrainerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        train(Connection("redis://127.0.0.1:1/0", "none"), settings(trackers=["wandb"]))
    assert str(raised.value) == "[trainer] trackers: 'wandb' needs the package 'wandb': pip install 'rollq[wandb]'"


def test_an_unknown_tracker_is_refused(settings: Callable[..., TrainerSettings]) -> None:
    with pytest.raises(ValueError, match="tensorboard"):
        settings(trackers=["tensorbord"])
