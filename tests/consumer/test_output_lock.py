"""The reference trainer's output folder, and the run, are found in use before anything is loaded."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, TrainerHeld
from rollq.consumer.claims import connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.output_lock import LOCK_FILE, locked
from rollq.consumer.trainer.trainer import train
from support.forks import FORKS
from support.manual_worker import make_run


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    """Settings with a model that cannot be loaded."""
    values = {"model": tmp_path / "no model", "output": tmp_path / "out", "steps": 1}
    return TrainerSettings.model_validate(values)


def hold(output: Path, ready: Connection) -> None:
    """Hold the lock until killed."""
    with locked(output):
        ready.send(True)
        signal.pause()


def test_a_folder_that_a_trainer_uses_is_refused_to_another_until_that_is_killed(settings: TrainerSettings) -> None:
    here, there = multiprocessing.Pipe()
    process = FORKS.Process(target=hold, args=(settings.output, there))
    process.start()
    assert here.recv()
    in_use = rf"^\[trainer\] output: '.*out' is in use by another trainer \(process {process.pid} on .*\): stop it, or"
    with pytest.raises(ConfigError, match=in_use):
        train(connection.Connection("redis://127.0.0.1:1/0", "none"), settings)
    process.kill()
    process.join()
    with locked(settings.output):
        assert f"process {os.getpid()} " in (settings.output / LOCK_FILE).read_text()


def test_a_run_that_is_held_is_refused_before_the_model_is_loaded(
    settings: TrainerSettings, buffer: Buffer, server_url: str, run_name: str
) -> None:
    make_run(buffer)
    buffer.begin_epoch(trainer_id="first", launch_id="first", from_step=0, uri="u", digest="d")
    with pytest.raises(TrainerHeld, match="trainer 'first'"):
        train(connection.Connection(server_url, run_name), settings)
