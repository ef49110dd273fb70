"""Two trainers that want one run: who is refused, who waits, and who takes over at once."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import TrainerHeld
from rollq.consumer import Consumer, ConsumerSettings
from support.forks import FORKS
from support.manual_worker import make_run

Connect = Callable[..., Consumer]


@pytest.fixture
def connect(server_url: str, buffer: Buffer, run_name: str, model_folder: Path) -> Connect:
    make_run(buffer)

    def open_consumer(**settings: object) -> Consumer:
        chosen = ConsumerSettings.model_validate({"timeout_s": 0.2, **settings})
        return Consumer.connect(server_url, run=run_name, weights=model_folder, settings=chosen)

    return open_consumer


def hold(url: str, run: str, ready: Connection) -> None:
    """Hold a run until killed."""
    with Buffer.connect(url, run) as buffer:
        buffer.begin_epoch(trainer_id="killed", launch_id="killed", from_step=0, uri="u", digest="d")
        ready.send(True)
        signal.pause()


@pytest.fixture
def killed(server_url: str, buffer: Buffer, run_name: str) -> None:
    """A trainer that was killed while it held the run."""
    make_run(buffer)
    here, there = multiprocessing.Pipe()
    process = FORKS.Process(target=hold, args=(server_url, run_name, there))
    process.start()
    assert here.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def describe_holder(buffer: Buffer, **changes: str) -> None:
    """Change what the live trainer says of its process."""
    described = buffer.client.hget(buffer.keys.trainer, "process")
    assert isinstance(described, bytes)
    buffer.client.hset(buffer.keys.trainer, "process", orjson.dumps({**orjson.loads(described), **changes}))


def expire_in(buffer: Buffer, ms: int) -> None:
    buffer.client.hset(buffer.keys.trainer, "deadline_ms", buffer.server_ms() + ms)


def test_a_trainer_that_is_started_twice_is_refused_and_learns_the_setting(connect: Connect) -> None:
    with connect() as first:
        with pytest.raises(TrainerHeld, match=rf"process {os.getpid()} on .* set takeover = true"):
            connect()
        first.take_production()


@pytest.mark.usefixtures("killed")
def test_a_trainer_that_was_killed_is_replaced_at_once(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with connect() as second:
        assert second.epoch == 2
    assert "waiting" not in caplog.text


def test_a_trainer_that_has_ended_is_replaced_at_once_wherever_it_ran(
    connect: Connect, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect():
        describe_holder(buffer, namespace="elsewhere")
    with connect() as second:
        assert second.epoch == 2
    assert "waiting" not in caplog.text


def test_a_pid_that_was_given_again_is_not_the_trainer(connect: Connect, buffer: Buffer) -> None:
    connect()
    describe_holder(buffer, started="1")
    with connect() as second:
        assert second.epoch == 2


def test_a_process_that_nobody_has_waited_for_yet_has_ended(connect: Connect, buffer: Buffer) -> None:
    connect()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        describe_holder(buffer, pid=str(process.pid), started=ticks)
        with connect() as second:
            assert second.epoch == 2


@pytest.mark.parametrize("changes", [{"namespace": "elsewhere"}, {"launch_id": "that of an older rollq"}])
def test_a_trainer_that_cannot_be_looked_up_is_replaced_when_its_lease_expires(
    connect: Connect, buffer: Buffer, caplog: pytest.LogCaptureFixture, changes: dict[str, str]
) -> None:
    connect()
    describe_holder(buffer, **changes)
    expire_in(buffer, 500)
    with caplog.at_level(logging.WARNING), connect() as second:
        assert second.epoch == 2
    [line] = [record.message for record in caplog.records if "waiting" in record.message]
    assert "cannot be looked up from here; waiting up to" in line


def test_a_trainer_elsewhere_that_renews_its_lease_meanwhile_is_alive(
    connect: Connect, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect()
    describe_holder(buffer, namespace="elsewhere")
    expire_in(buffer, 20_000)
    looks = 0
    look = Buffer.holder

    def renew_then_look(self: Buffer) -> object:
        nonlocal looks
        looks += 1
        if looks == 3:
            expire_in(buffer, 30_000)
        return look(self)

    monkeypatch.setattr(Buffer, "holder", renew_then_look)
    with pytest.raises(TrainerHeld, match="takeover = true"):
        connect()
    assert buffer.live_model().epoch == 1  # type: ignore[union-attr]


@pytest.mark.usefixtures("killed")
def test_a_trainer_that_took_the_run_meanwhile_is_not_mistaken_for_the_killed_one(
    server_url: str, run_name: str, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Callable[..., TrainerEpoch] = buffer.begin_epoch

    def let_another_begin(*args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        with Buffer.connect(server_url, run_name) as another:
            another.begin_epoch(trainer_id="b", launch_id="b", from_step=0, uri="u", digest="b")

    monkeypatch.setattr(buffer, "_check_history", let_another_begin)
    with pytest.raises(TrainerHeld, match="trainer 'b'"):
        begin(trainer_id="a", launch_id="a", from_step=0, uri="u", digest="a")
