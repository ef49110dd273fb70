"""Calls on the server while 1,000 workers wait there, compared with the same calls in a run with one worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.pubsub import EventKind

WORKERS = 1_000
TARGET = 1.2
CALLS = 50
GROUP_SIZE = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48
RULES = TaskRules(batch_groups=CALLS, group_size=GROUP_SIZE, max_staleness=100_000, max_uncheckpointed_steps=1_000)
WORKER_WAITS_FOR = (EventKind.PUBLISH, EventKind.CONTROL)
REPORT = {"state": "idle", "in_flight": 0}


def measure(quick: bool) -> list[Result]:
    """A result for each kind of call that workers make."""
    workers, repetitions = (20, 2) if quick else (WORKERS, 15)
    with (
        server() as running,
        run(running.url, "alone", RULES) as without,
        run(running.url, "fleet", RULES) as with_fleet,
        waiting_workers(running.url, "alone", 1),
        waiting_workers(running.url, "fleet", workers),
    ):
        alone, fleet = Side(*without), Side(*with_fleet)
        take_turns(1, alone.measure, fleet.measure)  # warms caches and connections
        alone.us.clear()
        fleet.us.clear()
        take_turns(repetitions, alone.measure, fleet.measure)
    return [
        Result(
            name=f"fleet-{call}",
            what=f"{what} with {workers:,} workers that report, on the server, against one",
            unit="times",
            target=TARGET,
            better="lower",
            values=ratios(fleet.us[call], alone.us[call]),
            details={"us_with": float(np.median(fleet.us[call])), "us_with_one": float(np.median(alone.us[call]))},
        )
        for call, what in (("put", "put of a group"), ("lease", "lease of a group"), ("report", "a worker's report"))
    ]


@contextmanager
def waiting_workers(url: str, name: str, count: int) -> Iterator[None]:
    """`count` workers that have reported, and wait for weights and for control of their tasks."""
    with ExitStack() as workers:
        for number in range(count):
            buffer = workers.enter_context(Buffer.connect(url, name))
            buffer.report_worker(f"worker-{number}", REPORT)
            workers.enter_context(buffer.events(*WORKER_WAITS_FOR))
        yield


class Side:
    """The calls of one run. `us` has the time that each kind of call took on the server, per repetition, in µs."""

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch) -> None:
        self.us: dict[str, list[float]] = {}
        self._buffer = buffer
        self._epoch = epoch
        self._cursor = 0
        random = np.random.default_rng(0)
        self._group = [make_sample(random, PROMPT_TOKENS, RESPONSE_TOKENS, version=0) for _ in range(GROUP_SIZE)]

    def measure(self) -> float:
        """Run one repetition; the times are in `us`."""
        buffer, epoch = self._buffer, self._epoch.epoch
        first = admit_and_lease(buffer, epoch, self._cursor, CALLS, version=0)
        self._cursor += CALLS
        self._time("put", [partial(buffer.put, [result]) for result in results_of(first, [self._group] * CALLS)])
        admit_and_lease_later = admit_and_lease(buffer, epoch, self._cursor, CALLS, version=0)
        self._cursor += CALLS
        buffer.hand_back(admit_and_lease_later)
        lease = partial(buffer.lease, [TASK], 1, worker="bench", version=0, epoch=epoch)
        self._time("lease", [lease] * CALLS)
        self._time("report", [partial(buffer.report_worker, "worker-0", REPORT)] * CALLS)
        return 0.0

    def _time(self, call: str, calls: Sequence[Callable[[], object]]) -> None:
        before_us = self._server_us()
        for do in calls:
            do()
        self.us.setdefault(call, []).append((self._server_us() - before_us) / len(calls))

    def _server_us(self) -> float:
        return float(self._buffer.client.info("commandstats")["cmdstat_fcall"]["usec"])
