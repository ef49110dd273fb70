"""Ten minutes of 1,000 workers on one server: leases, renewals, reports and puts of 147 KB groups, as fast as possible.

Each process has many workers (see `benchmarks.logical_workers`). This process admits prompts, and claims, reads,
commits and checkpoints batches.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import orjson

from benchmarks.exchange import GROUP_SIZE
from benchmarks.fleet import WORKERS
from benchmarks.ranks import hear, tell
from benchmarks.results import Result
from benchmarks.world import QUESTION, TASK, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.pubsub import EventKind
from rollq.buffer.values.rollouts import Prompt
from rollq.monitor.doctor.examine import measured_tasks
from rollq.monitor.doctor.sizing import used_bytes

RUN = "sustained"
PROCESSES = 2
SECONDS = 600.0
QUICK_SECONDS = 6.0
BATCH = 512
CHECKPOINT_EVERY = 5
MAX_STALENESS = 4
ADMITTED_PER_CALL = 256
TARGET = 0.9


def measure(quick: bool) -> list[Result]:
    """One result: whether the rate of trained groups lasts. Its details are the other figures."""
    workers, seconds, batch = (20, QUICK_SECONDS, 16) if quick else (WORKERS, SECONDS, BATCH)
    rules = TaskRules(
        batch_groups=batch,
        group_size=GROUP_SIZE,
        max_staleness=MAX_STALENESS,
        max_uncheckpointed_steps=CHECKPOINT_EVERY,
    )
    with (
        server() as running,
        run(running.url, RUN, rules) as (buffer, epoch),
        started_workers(running.url, workers // PROCESSES) as processes,
    ):
        trainer = Trainer(buffer, epoch, rules)
        before = server_facts(buffer)
        for process in processes:
            tell(process, str(seconds))
        trainer.train(seconds)
        after = server_facts(buffer)
        puts_ms = [ms for process in processes for ms in orjson.loads(hear(process))]
        (size,) = measured_tasks(buffer).values()
    steps_s = np.diff(trainer.trained_at_s)
    first, second = np.array_split(steps_s, 2)
    rate = batch / float(np.mean(steps_s))
    return [
        Result(
            name="sustained",
            what=f"{workers:,} workers for {seconds:g} s: groups per second in the second half of the steps",
            unit="of the first half's",
            target=TARGET,
            better="higher",
            values=tuple((np.mean(first) / second).tolist()),
            details={
                "groups_per_s": rate,
                "mb_per_s": rate * size.payload_bytes / 1e6,
                "payload_kb": size.payload_bytes / 1e3,
                **percentiles("put", puts_ms),
                **percentiles("claim", trainer.claims_ms),
                **percentiles("fetch", trainer.fetches_ms),
                **shares({name: after[name] - before[name] for name in before}, seconds),
                "peak_used_mb": trainer.peak_bytes / 1e6,
                "formula_mb": used_bytes([size]) / 1e6,
            },
        )
    ]


class Trainer:
    """The producer's and the trainer's calls. `trained_at_s` has the time when each batch was committed, counted from
    the start."""

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch, rules: TaskRules) -> None:
        self.trained_at_s: list[float] = []
        self.claims_ms: list[float] = []
        self.fetches_ms: list[float] = []
        self.peak_bytes = 0
        self._buffer = buffer
        self._epoch = epoch
        self._rules = rules
        self._admitted = 0

    def train(self, seconds: float) -> None:
        """Train for some seconds."""
        started_s = time.monotonic()
        self._admit(step=1)
        step = 1
        with self._buffer.events(EventKind.COMPLETED) as events:
            while time.monotonic() - started_s < seconds:
                if not self._take(step):
                    events.wait(1.0)
                    continue
                self._buffer.commit(self._epoch, step)
                self.trained_at_s.append(time.monotonic() - started_s)
                self._buffer.publish(self._epoch, step, uri="", digest=str(step))
                self._admit(step + 1)
                self.peak_bytes = max(self.peak_bytes, self._buffer.client.info("memory")["used_memory"])
                if step % CHECKPOINT_EVERY == 0:
                    self._buffer.checkpoint(self._epoch, step)
                step += 1

    def _take(self, step: int) -> bool:
        """Claim and read the batch of `step`. Returns whether there was one."""
        started_s = time.perf_counter()
        claimed = self._buffer.claim(self._epoch, step, {TASK: self._rules.batch_groups})
        if not isinstance(claimed, Claimed):
            return False
        claimed_s = time.perf_counter()
        self._buffer.fetch(claimed.groups)
        self.claims_ms.append((claimed_s - started_s) * 1e3)
        self.fetches_ms.append((time.perf_counter() - claimed_s) * 1e3)
        return True

    def _admit(self, step: int) -> None:
        """Admit as many prompts as the live weights allow."""
        target = self._rules.batch_groups * (step - 1 + self._rules.stale_threshold)
        while self._admitted < target:
            cursor = self._admitted
            prompts = [
                (Prompt(QUESTION.format(cursor + i), answer=i), cursor + i + 1) for i in range(ADMITTED_PER_CALL)
            ]
            admitted = self._buffer.admit(
                TASK, prompts, epoch=self._epoch.epoch, cursor=cursor, target=target, step=step
            )
            self._admitted = admitted.cursor
            if admitted.count == 0:
                return


@contextmanager
def started_workers(url: str, each: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """The processes of all workers, connected."""
    pipe = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    module = [sys.executable, "-m", "benchmarks.logical_workers", url, RUN]
    processes = [pipe([*module, str(number * each), str(each)]) for number in range(PROCESSES)]
    try:
        for process in processes:
            hear(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def server_facts(buffer: Buffer) -> dict[str, float]:
    """The work of the server so far: CPU seconds in all, in functions and in other commands, calls, and rewrites."""
    cpu, persistence = buffer.client.info("cpu"), buffer.client.info("persistence")
    commands = {name: stats["usec"] / 1e6 for name, stats in buffer.client.info("commandstats").items()}
    commands.pop("cmdstat_exec", None)  # includes the commands of its transaction
    functions_s = commands.get("cmdstat_fcall", 0.0)
    return {
        "cpu_s": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        "functions_s": functions_s,
        "commands_s": sum(commands.values()) - functions_s,
        "children_s": cpu["used_cpu_user_children"] + cpu["used_cpu_sys_children"],
        "rewrites": persistence["aof_rewrites"],
    }


def shares(spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The server's CPU time in cores, and its parts."""
    return {
        "server_cores": spent["cpu_s"] / seconds,
        "functions_share": spent["functions_s"] / spent["cpu_s"],
        "other_commands_share": spent["commands_s"] / spent["cpu_s"],
        "rewriting_cores": spent["children_s"] / seconds,
        "rewrites": spent["rewrites"],
    }


def percentiles(call: str, times_ms: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {f"{call}_p{percent}_ms": float(np.percentile(times_ms, percent)) for percent in (50, 99)}
