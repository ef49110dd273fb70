"""A worker in a thread that keeps the reference trainer of a test busy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerError
from rollq.buffer.store.connection import Patience
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3


@contextmanager
def fed(url: str, run: str, folder: Path) -> Iterator[None]:
    """A run with the task `math`, and a worker that keeps up with its trainer."""
    stop = threading.Event()

    def work() -> None:
        patience = Patience(inf, inf, stop)
        with suppress(ServerError), Buffer.connect(url, run, patience=patience) as buffer, buffer.events() as events:
            worker = HandWorker(buffer, tiny_qwen3(1), folder)
            while not stop.is_set():
                counts = buffer.counts("math")
                if counts.clock.version >= 0 and counts.ready < 2:
                    worker.produce(2, "math")
                events.wait(0.05)

    thread = threading.Thread(target=work)
    with Buffer.connect(url, run) as buffer:
        make_run(buffer)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
