"""User code that blocks a worker's event loop: its leases stay, monitors learn why, and it can be interrupted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Prompt, Sample, Status
from rollq.workers.run import Worker
from rollq.workers.user_code import loop_watch
from support.waiting import wait_until
from support.worker_run import Script, WorkerWorld

LEASE_S = 3.0
RELEASED = threading.Event()


async def blocking_judge(prompt: Prompt, sample: Sample) -> float:
    while not RELEASED.is_set():
        time.sleep(0.02)
    return 1.0


@pytest.fixture
def world(buffer: Buffer, server_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerWorld]:
    monkeypatch.setattr(loop_watch, "BEAT_S", 0.02)
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.3)
    monkeypatch.setattr(loop_watch, "LOOK_S", 0.1)
    RELEASED.clear()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield WorkerWorld(buffer, server_url, {"judge": f"{__name__}.blocking_judge", "group_size": 1, "lease_s": LEASE_S})
    for number, handler in handlers.items():
        signal.signal(number, handler)


def blocked_by(buffer: Buffer) -> str:
    return next((str(report.get("blocked_by", "")) for report in buffer.workers().values()), "")


class Beside(threading.Thread):
    """Runs `scene` beside a worker whose loop is blocked; `result` raises what it raised."""

    def __init__(self, scene: Any) -> None:
        super().__init__()
        self._scene = scene
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._scene()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.error = error
        finally:
            RELEASED.set()

    def result(self) -> None:
        self.join()
        if self.error is not None:
            raise self.error


def test_leases_are_kept_and_the_function_is_named_while_it_blocks_the_loop(world: WorkerWorld) -> None:
    def look() -> None:
        wait_until(lambda: "blocking_judge" in blocked_by(world.buffer))
        assert blocked_by(world.buffer).startswith("tests/workers/test_loop_watch.py:")
        end_s = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < end_s:
            assert world.buffer.reap("math").requeued == 0
            time.sleep(0.1)
        assert world.count(Status.RUNNING) == 1

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: not blocked_by(world.buffer))

    world.admit(1)
    beside = Beside(look)
    world.play(scene)
    beside.result()


def test_a_signal_ends_the_function_that_blocks_the_loop(world: WorkerWorld) -> None:
    def interrupt() -> None:
        wait_until(lambda: "blocking_judge" in blocked_by(world.buffer))
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: world.count(Status.FAILED) == 1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.intake.stopped)

    world.admit(1)
    beside = Beside(interrupt)
    world.play(scene)
    beside.result()
    assert "KeyboardInterrupt" in world.error(1)
