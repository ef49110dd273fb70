"""The share of the server's time that a watcher takes by reading the status of a run each second."""

from typing import Any

from benchmarks.fill import fill, in_bulk
from benchmarks.results import Result
from benchmarks.world import TASK, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.history import HISTORY_COUNTERS, HISTORY_ROWS
from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.read import read_status

GROUPS = 10_000
WORKERS = 500
READS = 100
REPORT = {
    "pid": 12345, "host": "a-machine", "engine": "vllm", "capacity": 256, "tokens_per_s": 1234.5, "generate_s": 12.3456,
    "judge_s": 0.1234, "version": 17, "epoch": 1, "state": "serving", "asleep_for": "", "transfer_ranks": 0,
    "in_flight": 200, "refused_weights": None, "groups": 12345, "samples": 98760, "failed_samples": 12,
    "tokens": 123456789, "recomputed_tokens": 0, "swaps": 17, "swap_pause_s": 1.234, "restarted": 0, "refused": 3,
}  # fmt: skip
RULES = TaskRules(batch_groups=256, group_size=8, max_staleness=100, keep_window=256)


def measure(quick: bool) -> list[Result]:
    """One result: the CPU time of the server for one read, as a share of the second until the next read."""
    groups, workers, reads = (500, 20, 5) if quick else (GROUPS, WORKERS, READS)
    with server() as running, run(running.url, "watched", RULES) as (buffer, epoch):
        with in_bulk(buffer.client):
            fill(buffer, [(0, groups)], RULES.group_size)
        surround(buffer, workers)
        buffer.renew_trainer(epoch)
        queue = open_queue(running.url, buffer.run)
        if (seen := len(read_status(buffer, queue).workers)) != workers:
            raise RuntimeError(f"{seen} of {workers} workers are shown")
        before_us = commands_us(buffer)
        values = []
        for _ in range(3 if quick else 11):
            before_s = cpu_s(buffer)
            for _ in range(reads):
                read_status(buffer, queue)
            values.append((cpu_s(buffer) - before_s) / reads * 100)
        in_commands_us = (commands_us(buffer) - before_us) / reads / len(values)
    return [
        Result(
            name="watching",
            what=f"server's CPU for a status of {groups:,} groups and {workers} workers, read each second",
            unit="%",
            target=1.0,
            better="lower",
            values=tuple(values),
            details={"in_commands_us": in_commands_us},
        )
    ]


def surround(buffer: Buffer, workers: int) -> None:
    """The reports, outcomes and history that a run of a day has."""
    report(buffer, workers)
    prefix = task_keys(buffer.run, TASK).prefix
    row = ",".join(["1700000000000", "17", "16", "256", *["1234"] * len(Status), *["123456"] * len(HISTORY_COUNTERS)])
    buffer.client.rpush(f"{prefix}history", *[row] * HISTORY_ROWS)
    buffer.client.rpush(f"{prefix}outcomes", *[1] * RULES.keep_window)


def report(buffer: Buffer, workers: int) -> None:
    """Have each of these workers report."""
    for number in range(workers):
        buffer.report_worker(f"worker-{number:03}-0123abcd", REPORT)


def cpu_s(buffer: Buffer) -> float:
    """The server's CPU time since its start, in seconds."""
    info: Any = buffer.client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def commands_us(buffer: Buffer) -> float:
    """The part of the server's CPU time that commands took, in microseconds."""
    stats: Any = buffer.client.info("commandstats")
    return float(sum(command["usec"] for command in stats.values()))
