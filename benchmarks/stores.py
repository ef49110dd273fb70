"""Groups of 100 MB whose samples are in a folder or in a bucket, compared with plain writes and reads of their
bytes."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np

from benchmarks.exchange import GROUP_SIZE, NEVER_STALE, RollqSide, encode
from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import make_sample, run, server
from rollq.buffer.common.s3 import open_bucket
from rollq.buffer.rules.settings import PayloadSettings, TaskRules

RESPONSE_TOKENS = 1_560_000
"""The tokens of each of 8 samples: with 8 bytes a token, they take about 100 MB."""
PER_CALL = 4
GROUPS = 128
"""The groups of a step, in batches of `PER_CALL`, so that they fit into memory."""
REPETITIONS = 3

Raw = tuple[Callable[[int, bytes], object], Callable[[int], int], Callable[[int], object]]
"""Writes, reads and removes the value with a number; reading returns its size."""


def measure(quick: bool) -> list[Result]:
    """A result for a folder, and one for the bucket that ROLLQ_PAYLOADS_URL names. If `quick`, with small groups."""
    with tempfile.TemporaryDirectory(prefix="rollq-bench-") as folder:
        results = _compare("folder", folder, _raw_files(Path(folder)), quick)
    if url := os.environ.get("ROLLQ_PAYLOADS_URL"):
        results += _compare("bucket", url, _raw_objects(url), quick)
    return results


def _compare(place: str, url: str, raw: Raw, quick: bool) -> list[Result]:
    rules = TaskRules(
        batch_groups=PER_CALL, group_size=GROUP_SIZE, max_staleness=NEVER_STALE, max_uncheckpointed_steps=1_000
    )
    random = np.random.default_rng(0)
    tokens = 15_000 if quick else RESPONSE_TOKENS
    groups = [[make_sample(random, 512, tokens, version=0) for _ in range(GROUP_SIZE)]] * PER_CALL
    calls = 1 if quick else GROUPS // PER_CALL
    payloads = PayloadSettings(url=url, min_bytes=1 << 16)
    with server() as running, run(running.url, f"stores-{place}", rules, payloads) as (buffer, epoch):
        rollq, blob = RollqSide(buffer, epoch, groups, calls), encode(groups[0])
        shares: list[float] = []

        def through_rollq() -> float:
            started_s, before_s = time.perf_counter(), _cpu_s(rollq)
            rate = rollq.groups_per_s()
            shares.append((_cpu_s(rollq) - before_s) / (time.perf_counter() - started_s))
            buffer.collect("math")
            return rate

        def plainly() -> float:
            write, read, remove = raw
            started_s = time.perf_counter()
            for first in range(0, calls * PER_CALL, PER_CALL):
                numbers = range(first, first + PER_CALL)
                for number in numbers:
                    write(number, blob)
                if {read(number) for number in numbers} != {len(blob)}:
                    raise RuntimeError("a value came back changed")
            rate = calls * PER_CALL / (time.perf_counter() - started_s)
            for number in range(calls * PER_CALL):
                remove(number)
            return rate

        through, floor = take_turns(1 if quick else REPETITIONS, through_rollq, plainly)
    what = f"a step of {calls * PER_CALL} groups of {len(blob) / 1e6:.0f} MB through a {place}"
    details = {
        "rollq_mb_per_s": float(np.median(through)) * len(blob) / 1e6,
        "raw_mb_per_s": float(np.median(floor)) * len(blob) / 1e6,
    }
    return [
        Result(
            name=f"store-{place}",
            what=f"{what}, against plain writes and reads",
            unit="of the raw rate",
            target=0.8,
            better="higher",
            values=ratios(through, floor),
            details=details,
        ),
        Result(
            name=f"store-{place}-server",
            what=f"{what}: the server's CPU time",
            unit="of a core",
            target=0.05,
            better="lower",
            values=tuple(shares),
            details={},
        ),
    ]


def _cpu_s(rollq: RollqSide) -> float:
    info = rollq.buffer.client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _raw_files(folder: Path) -> Raw:
    def path(number: int) -> Path:
        return folder / f"raw-{number}"

    return (
        lambda number, blob: path(number).write_bytes(blob),
        lambda number: len(path(number).read_bytes()),
        lambda number: path(number).unlink(),
    )


def _raw_objects(url: str) -> Raw:
    import obstore

    store, run = open_bucket(url, {"timeout": "120s"}, what="payloads"), uuid4().hex
    return (
        lambda number, blob: obstore.put(store, f"{run}/{number}", blob),
        lambda number: len(obstore.get(store, f"{run}/{number}").bytes()),
        lambda number: obstore.delete(store, f"{run}/{number}"),
    )
