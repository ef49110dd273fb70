"""A worker as a whole."""

import os
import signal

from rollq.buffer.buffer import Buffer
from rollq.workers.run import Worker
from support.worker_run import Script, WorkerWorld


def test_a_worker_that_is_asked_to_stop_while_its_engine_starts_does_not_wait_for_it(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.sleeps == ["starting"])
        os.kill(os.getpid(), signal.SIGTERM)

    script = world.play(scene, engine="support.worker_run.LoadingEngine")
    assert script.sleeps == ["starting", "start ended"]
    assert buffer.workers() == {}
