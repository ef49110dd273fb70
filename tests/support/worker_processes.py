"""Worker processes of one run, in tests that kill them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollq.buffer.values.rollouts import Lease, Prompt, Sample, Status
from support.forks import fork
from support.salvage_worker import work
from support.waiting import wait_until
from support.worker_run import WorkerWorld


@dataclass
class Workers:
    """Worker processes of one run, killed at the end at the latest."""

    world: WorkerWorld
    stack: ExitStack
    folder: Path
    count: int = field(default=0)

    def start(self, engine: str, **options: Any) -> BaseProcess:
        self.count += 1
        settings = {"engine": engine, "options": options, "grace_s": 1, "engine_restarts": 99}
        if "model" in options:
            settings["tokenizer"] = options["model"]
        log = self.folder / f"worker-{self.count}.log"
        worker = fork(self.folder, log, work, self.world.url, self.world.buffer.run, self.world.rules, settings)
        self.stack.callback(worker.join)
        self.stack.callback(worker.kill)
        return worker

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until `happened` returns True; if it never does, show what the workers logged."""
        wait_until(happened, otherwise=lambda: [path.read_text() for path in sorted(self.folder.glob("worker-*.log"))])

    def until_parts(self, parts: int) -> None:
        """Wait until so many parts of the only group were salvaged."""
        self.until(lambda: int(self.world.buffer.inspect("math", 1).get("parts", 0)) >= parts)

    def kill(self, worker: BaseProcess) -> list[Sample]:
        """Kill the worker of the only group; returns the samples that the next one gets."""
        worker.kill()
        worker.join()
        self.world.world.run_out([Lease("math", 1, 0, "", 0, Prompt(""), (), 0)])
        assert self.world.buffer.reap("math").requeued == 1
        self.world.world.check()
        (lease,) = self.world.world.lease(1, worker="a look")
        assert lease.suspect
        self.world.buffer.hand_back([lease])
        self.world.tickets(1)
        return list(lease.samples)

    def result(self) -> list[Sample]:
        """The samples of the only group, when it is completed."""
        self.until(lambda: self.world.count(Status.COMPLETED) == 1)
        self.world.world.check()
        ((_, samples),) = self.world.results(1)
        return list(samples)
