"""Groups through the buffer (put, claim, fetch; numpy to numpy), compared with SET + ZADD and ZPOPMIN + GETDEL."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import WHOLE, Group, GroupResult, Sample
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.group_fields import encode_payload
from rollq.buffer.wire.plain_groups import encode_plain

GROUP_SIZE = 8


class Size(NamedTuple):
    """Groups of one size: prompt and response tokens of each of the 8 samples; groups per call -> target ratio; calls
    per repetition with one group each, and repetitions."""

    prompt_tokens: int
    response_tokens: int
    targets: Mapping[int, float]
    calls: int
    repetitions: int


SIZES = {
    "4 KB": Size(16, 56, {1: 0.5, 16: 0.45}, 150, 15),
    "147 KB": Size(512, 2048, {1: 0.6, 16: 0.75}, 150, 15),
    "1 MB": Size(2048, 15_000, {1: 0.9, 16: 0.9}, 40, 11),
    "16 MB": Size(16_000, 240_000, {1: 0.9, 16: 0.9}, 4, 7),
}
"""Label with the size of a group's arrays -> the groups."""
NEVER_STALE = 100_000
"""Staleness limit in steps, so that the same samples can be used for every batch."""

T = TypeVar("T")


def measure(quick: bool) -> list[Result]:
    """Two results for each size: with one and with 16 groups per call. If `quick`, only for sizes up to 1 MB."""
    with server() as running:
        return [
            _compare(running.url, label, size, per_call, quick)
            for label, size in SIZES.items()
            for per_call in size.targets
            if not (quick and label == "16 MB")
        ]


def _compare(url: str, label: str, size: Size, per_call: int, quick: bool) -> Result:
    name = f"exchange-{label.replace(' ', '').lower()}-{per_call}"
    calls = 2 if quick else max(1, size.calls * 2 // (per_call + 1))
    rules = TaskRules(
        batch_groups=per_call, group_size=GROUP_SIZE, max_staleness=NEVER_STALE, max_uncheckpointed_steps=1_000
    )
    random = np.random.default_rng(0)
    groups = [
        [make_sample(random, size.prompt_tokens, size.response_tokens, version=0) for _ in range(GROUP_SIZE)]
        for _ in range(per_call)
    ]
    with run(url, name, rules) as (buffer, epoch):
        rollq, raw = RollqSide(buffer, epoch, groups, calls), RawSide(buffer, groups, calls)
        take_turns(1, rollq.groups_per_s, raw.groups_per_s)  # warms caches and connections
        through_rollq, floor = take_turns(2 if quick else size.repetitions, rollq.groups_per_s, raw.groups_per_s)
        return Result(
            name=name,
            what=f"put + claim of {label} groups, {per_call} per call, against raw commands",
            unit="of the raw rate",
            target=size.targets[per_call],
            better="higher",
            values=ratios(through_rollq, floor),
            details={
                "rollq_groups_per_s": float(np.median(through_rollq)),
                "raw_groups_per_s": float(np.median(floor)),
                "encoded_bytes": float(len(raw.blob)),
            },
            profile_us=rollq.profile_us(),
        )


class RollqSide:
    """Exchanges groups through the buffer. The timed part is put, claim and fetch of one batch after another. Admission
    and leases come before it, commits and checkpoints after it: other benchmarks measure them.
    """

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch, groups: Sequence[Sequence[Sample]], calls: int) -> None:
        self.buffer = buffer
        self.epoch = epoch
        self.groups = groups
        self.calls = calls
        self.step = 0

    def groups_per_s(self) -> float:
        """Run one repetition."""
        batches = [self._lease(self.step + i) for i in range(self.calls)]
        started_s = time.perf_counter()
        for i, results in enumerate(batches, start=1):
            self.buffer.put(results)
            fetched = self.buffer.fetch(self._claim(self.step + i).groups)
        elapsed_s = time.perf_counter() - started_s
        self._commit(fetched)
        return self.calls * len(self.groups) / elapsed_s

    def profile_us(self) -> dict[str, float]:
        """Time the parts of one group's exchange separately: medians over `calls` calls, in µs."""
        parts: dict[str, list[float]] = {}

        def timed(part: str, do: Callable[[], T]) -> T:
            started_s = time.perf_counter()
            result = do()
            parts.setdefault(part, []).append((time.perf_counter() - started_s) * 1e6 / len(self.groups))
            return result

        batches = [self._lease(self.step + i) for i in range(self.calls)]
        for i, results in enumerate(batches, start=1):
            before_us = self._server_us()
            timed("put", partial(self.buffer.put, results))
            claimed = timed("claim", partial(self._claim, self.step + i))
            parts.setdefault("functions on the server", []).append((self._server_us() - before_us) / len(self.groups))
            fetched = timed("fetch", partial(self.buffer.fetch, claimed.groups))
            frames = timed("check and encode", lambda: list(map(encode, self.groups)))
            timed("decode", partial(_decode, frames))
        self._commit(fetched)
        return {part: float(np.median(values)) for part, values in parts.items()}

    def _lease(self, batches_before: int) -> list[GroupResult]:
        count = len(self.groups)
        leases = admit_and_lease(self.buffer, self.epoch.epoch, batches_before * count, count, version=0)
        return results_of(leases, self.groups)

    def _claim(self, step: int) -> Claimed:
        claimed = self.buffer.claim(self.epoch, step, {TASK: len(self.groups)})
        if not isinstance(claimed, Claimed):
            raise RuntimeError(f"put {len(self.groups)} groups, but claimed none: {claimed}")
        return claimed

    def _commit(self, last_fetched: Sequence[Group]) -> None:
        if last_fetched[-1].samples[0].segments[0].response_ids[-1] != self.groups[-1][0].segments[0].response_ids[-1]:
            raise RuntimeError("a group came back changed")
        for _ in range(self.calls):
            self.step += 1
            self.buffer.commit(self.epoch, self.step)
        self.buffer.checkpoint(self.epoch, self.step)

    def _server_us(self) -> float:
        return float(self.buffer.client.info("commandstats")["cmdstat_fcall"]["usec"])


def encode(group: Sequence[Sample]) -> bytes:
    """The frame of a group, as the buffer stores it."""
    plain = encode_plain(group)
    return bytes(plain.frame) if plain else encode_payload(group, range(len(group)), group_size=len(group))[WHOLE]


def _decode(frames: Sequence[bytes]) -> list[Samples]:
    return list(map(decode_samples, frames))


class RawSide:
    """The baseline: the same bytes, already encoded, through plain commands in the same batches and the same client."""

    def __init__(self, buffer: Buffer, groups: Sequence[Sequence[Sample]], calls: int) -> None:
        self.client = buffer.client
        self.blob = encode(groups[0])
        self.count = len(groups)
        self.calls = calls
        self.arrival = 0

    def groups_per_s(self) -> float:
        """Run one repetition."""
        started_s = time.perf_counter()
        for _ in range(self.calls):
            self._put()
            self._take()
        return self.calls * self.count / (time.perf_counter() - started_s)

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
