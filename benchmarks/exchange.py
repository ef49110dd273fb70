"""Groups through the buffer (put, claim, fetch; from numpy to numpy), against raw SET + ZADD and ZPOPMIN + GETDEL."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run, server
from rollq.buffer.codec import encode_group
from rollq.buffer.replay import Buffer
from rollq.buffer.schema import Sample
from rollq.buffer.settings import TaskRules
from rollq.buffer.values import Claimed, TrainerEpoch

TARGET = 0.5
GROUP_SIZE = 8
SIZES = {"4 KB": (16, 48), "147 KB": (512, 2048)}
"""Prompt and response tokens of each of the 8 samples; named after the bytes of their arrays."""
PER_CALL = (1, 16)
NEVER_STALE = 100_000
"""Steps: the same samples serve for every batch."""


def measure(quick: bool) -> list[Result]:
    """Four figures: small and large groups, one and 16 per call."""
    results = []
    with server() as running:
        for label, (prompt_tokens, response_tokens) in SIZES.items():
            for per_call in PER_CALL:
                calls = 2 if quick else (400 if per_call == 1 else 80) // (1 if response_tokens < 1000 else 4)
                name = f"exchange-{label.replace(' ', '').lower()}-{per_call}"
                rules = TaskRules(batch_groups=per_call, group_size=GROUP_SIZE, max_staleness=NEVER_STALE)
                with run(running.url, name, rules) as (buffer, epoch):
                    groups = _make_groups(prompt_tokens, response_tokens, per_call)
                    ours, raw = Ours(buffer, epoch, groups, calls), Raw(buffer, groups, calls)
                    take_turns(1, ours.groups_per_s, raw.groups_per_s)  # warm caches and connections
                    mine, floor = take_turns(2 if quick else 15, ours.groups_per_s, raw.groups_per_s)
                results.append(
                    Result(
                        name=name,
                        what=f"put + claim of {label} groups, {per_call} per call, against raw commands",
                        unit="of the raw floor",
                        target=TARGET,
                        better="higher",
                        values=ratios(mine, floor),
                        details={
                            "rollq_groups_per_s": float(np.median(mine)),
                            "raw_groups_per_s": float(np.median(floor)),
                            "encoded_bytes": float(len(raw.blob)),
                        },
                    )
                )
    return results


def _make_groups(prompt_tokens: int, response_tokens: int, count: int) -> list[list[Sample]]:
    random = np.random.default_rng(0)
    return [
        [make_sample(random, prompt_tokens, response_tokens, version=0) for _ in range(GROUP_SIZE)]
        for _ in range(count)
    ]


@dataclass
class Ours:
    """The buffer's side. Timed: put, claim, fetch; not timed: admit, lease, commit, checkpoint."""

    buffer: Buffer
    epoch: TrainerEpoch
    groups: Sequence[Sequence[Sample]]
    calls: int
    step: int = 0
    timed_s: float = field(default=0.0, init=False)

    def groups_per_s(self) -> float:
        """One repetition."""
        self.timed_s = 0.0
        for _ in range(self.calls):
            self._batch()
        return self.calls * len(self.groups) / self.timed_s

    def _batch(self) -> None:
        count = len(self.groups)
        leases = admit_and_lease(self.buffer, self.epoch.epoch, self.step * count, count, version=0)
        self.step += 1
        results = results_of(leases, self.groups)
        started = time.perf_counter()
        self.buffer.put(results)
        claimed = self.buffer.claim(self.epoch, self.step, {TASK: count})
        if not isinstance(claimed, Claimed):
            raise RuntimeError(f"put {count} groups, claimed none: {claimed}")
        fetched = self.buffer.fetch(claimed.groups)
        self.timed_s += time.perf_counter() - started
        if fetched[-1].samples[0].segments[0].response_ids[-1] != self.groups[-1][0].segments[0].response_ids[-1]:
            raise RuntimeError("a group came back changed")
        self.buffer.commit(self.epoch, self.step)
        self.buffer.checkpoint(self.epoch, self.step)


class Raw:
    """The floor: the same bytes under plain commands, encoded beforehand, batched alike, through the same client."""

    def __init__(self, buffer: Buffer, groups: Sequence[Sequence[Sample]], calls: int) -> None:
        self.client = buffer.client
        self.blob = b"".join(encode_group(groups[0], group_size=GROUP_SIZE))
        self.count = len(groups)
        self.calls = calls
        self.arrival = 0

    def groups_per_s(self) -> float:
        """One repetition."""
        started = time.perf_counter()
        for _ in range(self.calls):
            self._put()
            self._take()
        return self.calls * self.count / (time.perf_counter() - started)

    def _put(self) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for _ in range(self.count):
                self.arrival += 1
                pipe.set(f"raw:{self.arrival}", self.blob)
                pipe.zadd("raw", {f"{self.arrival}": self.arrival})
            pipe.execute()

    def _take(self) -> None:
        popped: Any = self.client.zpopmin("raw", self.count)
        with self.client.pipeline(transaction=False) as pipe:
            for member, _ in popped:
                pipe.getdel(f"raw:{member.decode()}")
            blobs = pipe.execute()
        if len(blobs) != self.count or len(blobs[-1]) != len(self.blob):
            raise RuntimeError("a blob came back changed")
