"""Eight ranks take one batch: ranks that read their shares are compared with ranks that read the whole batch. A further
result is the wait for a batch that was read while the previous batch was trained.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.consumer import Consumer, ConsumerSettings

RANKS = 8
PROMPT_TOKENS = 256
CALL_GROUPS = 8
MOST_BYTES = 1.1
MOST_TIME = 0.3
MOST_WAIT_MS = 20


class Size(NamedTuple):
    """Groups in a batch, samples in a group, tokens of a response, repetitions, and the time of a train step."""

    groups: int
    samples: int
    tokens: int
    repetitions: int
    step_s: float


FULL = Size(64, 16, 16_384, 7, 4.0)
QUICK = Size(8, 4, 256, 2, 1.5)


def measure(quick: bool) -> list[Result]:
    """Bytes and time of a batch on several ranks, and the wait of one rank with and without reading ahead."""
    size = QUICK if quick else FULL
    return [*measure_ranks(size), measure_wait(size)]


def measure_ranks(size: Size) -> list[Result]:
    """The bytes that the ranks read in all, and their time from the claim to tensors."""
    with server() as running, Buffer.connect(running.url, "ranks") as buffer:
        register(buffer, size)
        with started_ranks(running.url) as ranks:
            empty_bytes = buffer.client.info("memory")["used_memory_dataset"]
            fill(buffer, size, first=0)
            batch_bytes = buffer.client.info("memory")["used_memory_dataset"] - empty_bytes
            sides = [RanksSide(buffer, ranks, how) for how in ("share", "whole")]
            take_turns(1, *(side.seconds for side in sides))  # warms caches and connections
            for side in sides:
                side.read_bytes.clear()
            share_s, whole_s = take_turns(size.repetitions, *(side.seconds for side in sides))
    share, whole = sides
    batch = f"a batch of {size.groups} groups of {size.samples} x {size.tokens:,} tokens"
    return [
        Result(
            name="ranks-bytes",
            what=f"bytes that {RANKS} ranks read in all of {batch}, against its bytes in the server",
            unit="times",
            target=MOST_BYTES,
            better="lower",
            values=tuple(read / batch_bytes for read in share.read_bytes),
            details={
                "batch_mb": batch_bytes / 1e6,
                "read_mb": float(np.median(share.read_bytes)) / 1e6,
                "whole_read_mb": float(np.median(whole.read_bytes)) / 1e6,
            },
        ),
        Result(
            name="ranks-time",
            what=f"claim to tensors of {batch} on {RANKS} ranks, against ranks that read all of it",
            unit="times as long",
            target=MOST_TIME,
            better="lower",
            values=ratios(share_s, whole_s),
            details={"share_s": float(np.median(share_s)), "whole_s": float(np.median(whole_s))},
        ),
    ]


def measure_wait(size: Size) -> Result:
    """The wait of one rank for a batch that is ready before it asks."""
    import torch

    waits_ms: dict[str, list[float]] = {"ahead": [], "late": []}
    prefetched: list[float] = []
    with server() as running, ExitStack() as stack:
        for name, limit_bytes in (("ahead", 1 << 30), ("late", 0)):
            buffer = stack.enter_context(Buffer.connect(running.url, name))
            register(buffer, size)
            consumer = stack.enter_context(
                Consumer.connect(
                    running.url,
                    run=name,
                    weights={"weight": torch.zeros(1)},
                    settings=ConsumerSettings(prefetch_bytes=limit_bytes),
                )
            )
            fill(buffer, size, first=0)
            batch = next(consumer)
            for step in range(1, size.repetitions + 1):
                fill(buffer, size, first=step * size.groups)
                time.sleep(size.step_s)
                consumer.commit(batch)
                consumer.checkpoint(step)
                started_s = time.perf_counter()
                batch = next(consumer)
                waits_ms[name].append((time.perf_counter() - started_s) * 1e3)
                prefetched.append(batch.prefetched)
    return Result(
        name="prefetch-wait",
        what=f"wait for a batch of {size.groups} groups that is ready, read while {size.step_s:g} s of training passed",
        unit="ms",
        target=MOST_WAIT_MS,
        better="lower",
        values=tuple(waits_ms["ahead"]),
        details={
            "ms_without": float(np.median(waits_ms["late"])),
            "prefetched": float(np.mean(prefetched[: size.repetitions])),
        },
    )


class RanksSide:
    """All ranks take the batch of step 1. `read_bytes` counts the bytes that the server has sent them, per
    repetition."""

    def __init__(self, buffer: Buffer, ranks: Sequence["subprocess.Popen[str]"], how: str) -> None:
        self.read_bytes: list[float] = []
        self._buffer = buffer
        self._ranks = ranks
        self._how = how

    def seconds(self) -> float:
        """Run one repetition: until the last rank has its tensors."""
        before = self._sent_bytes()
        started_s = time.perf_counter()
        for rank in self._ranks:
            tell(rank, self._how)
        tokens = sum(int(hear(rank)) for rank in self._ranks)
        elapsed_s = time.perf_counter() - started_s
        if tokens == 0:
            raise RuntimeError("the ranks got no tokens")
        self.read_bytes.append(self._sent_bytes() - before)
        return elapsed_s

    def _sent_bytes(self) -> float:
        return float(self._buffer.client.info("stats")["total_net_output_bytes"])


@contextmanager
def started_ranks(url: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """The processes of all ranks, connected."""
    pipe = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ranks = [
        pipe([sys.executable, "-m", "benchmarks.rank", url, "ranks", str(rank), str(RANKS)]) for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            hear(rank)
        yield ranks
    finally:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in ranks:
            rank.wait(timeout=60)


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    """Send a line to a process."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: "subprocess.Popen[str]") -> str:
    """The next line of a process. Raises `RuntimeError` if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has ended")
    return line.strip()


def register(buffer: Buffer, size: Size) -> None:
    """Create the run with one task."""
    buffer.create_run()
    rules = TaskRules(batch_groups=size.groups, group_size=size.samples, max_staleness=1_000)
    buffer.register_task(TASK, rules)


def fill(buffer: Buffer, size: Size, first: int) -> None:
    """Complete one batch of groups, after `first` earlier groups."""
    random = np.random.default_rng(first)
    epoch = buffer.clock(TASK).epoch
    for start in range(first, first + size.groups, CALL_GROUPS):
        leases = admit_and_lease(buffer, epoch, start, CALL_GROUPS, version=0)
        groups = [
            [make_sample(random, PROMPT_TOKENS, size.tokens, version=0) for _ in range(size.samples)] for _ in leases
        ]
        buffer.put(results_of(leases, groups))
