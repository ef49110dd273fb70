"""Groups through their whole life on a cluster of three primaries with a replica each, compared with one server.

The benchmark compares the CPU time of the busiest node for a group. As long as clients keep up, that time limits how
many groups pass through the buffer, and other work on the machine hardly changes it.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import redis
from numpy.typing import NDArray
from redis.crc import key_slot

from benchmarks.exchange import GROUP_SIZE, NEVER_STALE, SIZES
from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_cluster import SLOTS, EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Sample

RUN = "cluster"
PRIMARIES = 3
CALL_GROUPS = 16
STEPS_PER_CHECKPOINT = 4


class Load(NamedTuple):
    """Groups of one size in tasks of equal shares: label in `SIZES`, tasks, target ratio, steps in a repetition."""

    label: str
    tasks: int
    target: float
    steps: int


LOADS = (Load("1 MB", 1, 2.5, 8), Load("147 KB", 3, 2.2, 16))
REPETITIONS = 7


def measure(quick: bool) -> list[Result]:
    """Two results for each load: compared with one server without a replica, and with one server that has a replica, as
    each primary has."""
    return [result for load in (LOADS[1:] if quick else LOADS) for result in _compare(load, quick)]


def _compare(load: Load, quick: bool) -> Iterator[Result]:
    steps, repetitions = (1, 2) if quick else (load.steps, REPETITIONS)
    tasks = spread_tasks(load.tasks)
    with server() as alone, replicated() as followed, cluster() as nodes, ExitStack() as stack:
        lives = [
            Life(stack, url, servers, tasks, load.label, steps)
            for url, servers in ((alone.url, [alone]), (followed.url, [followed]), (nodes.url, nodes.nodes))
        ]
        sides = [life.busiest_us for life in lives]
        take_turns(1, *sides)  # warms caches and connections
        lives[-1].all_us.clear()
        *ones_us, cluster_us = take_turns(repetitions, *sides)
    of_tasks = f"{load.tasks} tasks" if load.tasks > 1 else "one task"
    for replica, one_us in zip(("without a replica", "with one"), ones_us, strict=True):
        yield Result(
            name=f"cluster-{load.label.replace(' ', '').lower()}-{replica.replace(' ', '-')}",
            what=f"server CPU for a group of {load.label}, {of_tasks}: a server {replica}, against the busiest node of "
            f"{PRIMARIES} primaries with a replica each",
            unit="times",
            target=load.target,
            better="higher",
            values=ratios(one_us, cluster_us),
            details={
                "us_of_one": float(np.median(one_us)),
                "us_of_busiest": float(np.median(cluster_us)),
                "us_of_all_nodes": float(np.median(lives[-1].all_us)),
            },
        )


@contextmanager
def replicated() -> Iterator[EmbeddedServer]:
    """Run a server with a replica that has all its data, and delete the data afterwards."""
    with server() as primary, tempfile.TemporaryDirectory(prefix="rollq-bench-") as folder:
        follow = {"replicaof": f"{primary.bind} {primary.port}", "repl-diskless-sync-delay": "0"}
        with EmbeddedServer(Path(folder), directives=follow) as replica, redis.Redis.from_url(replica.url) as client:
            while client.info("replication")["master_link_status"] != "up":
                time.sleep(0.05)
            yield primary


@contextmanager
def cluster() -> Iterator[EmbeddedCluster]:
    """Run a cluster with a replica of each primary, and delete its data afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="rollq-bench-") as folder,
        EmbeddedCluster(Path(folder), primaries=PRIMARIES) as running,
    ):
        yield running


def spread_tasks(number: int) -> list[str]:
    """Names of tasks, each with its slot on a different primary."""
    if number == 1:
        return [TASK]
    by_primary: dict[int, str] = {}
    names = (f"{TASK}-{index}" for index in count())
    while len(by_primary) < number:
        name = next(names)
        slot = key_slot(task_keys(RUN, name).clock.encode())
        by_primary.setdefault(slot * PRIMARIES // SLOTS, name)
    return list(by_primary.values())


class Life:
    """Groups of one run, from admission to the checkpoint. `all_us` is the CPU time of all nodes for a group, in µs."""

    def __init__(
        self,
        stack: ExitStack,
        url: str,
        nodes: Sequence[EmbeddedServer],
        tasks: Sequence[str],
        label: str,
        steps: int,
    ) -> None:
        self.all_us: list[float] = []
        self._nodes = [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        self._buffer = stack.enter_context(Buffer.connect(url, RUN))
        self._buffer.create_run()
        rules = TaskRules(batch_groups=CALL_GROUPS, group_size=GROUP_SIZE, max_staleness=NEVER_STALE)
        for task in tasks:
            self._buffer.register_task(task, rules)
        self._epoch = self._buffer.begin_epoch(trainer_id="bench", launch_id=RUN, from_step=0, uri="", digest="")
        self._sizes: Mapping[str, int] = dict.fromkeys(tasks, CALL_GROUPS)
        self._groups = make_groups(label)
        self._steps = steps
        self._step = 0

    def busiest_us(self) -> float:
        """Run one repetition: the CPU time of the busiest node for a group, in µs."""
        before_s = self._cpu_s()
        for _ in range(self._steps):
            self._train()
        self._buffer.checkpoint(self._epoch, self._step)
        groups = self._steps * CALL_GROUPS * len(self._sizes)
        us = (self._cpu_s() - before_s) * 1e6 / groups
        self.all_us.append(float(us.sum()))
        return float(us.max())

    def _train(self) -> None:
        """Take a batch through its life, except for the checkpoint."""
        for task in self._sizes:
            leases = admit_and_lease(
                self._buffer, self._epoch.epoch, self._step * CALL_GROUPS, CALL_GROUPS, version=0, task=task
            )
            self._buffer.put(results_of(leases, self._groups))
        self._step += 1
        claimed = self._buffer.claim(self._epoch, self._step, self._sizes)
        if not isinstance(claimed, Claimed):
            raise RuntimeError(f"put {CALL_GROUPS} groups of each task, but claimed none: {claimed}")
        self._buffer.fetch(claimed.groups)
        self._buffer.commit(self._epoch, self._step)
        if self._step % STEPS_PER_CHECKPOINT == 0:
            self._buffer.checkpoint(self._epoch, self._step)

    def _cpu_s(self) -> NDArray[np.float64]:
        """CPU seconds of each node so far, without its children, which rewrite the append-only file."""
        found = [client.info("cpu") for client in self._nodes]
        return np.array([cpu["used_cpu_user"] + cpu["used_cpu_sys"] for cpu in found])


def make_groups(label: str) -> list[list[Sample]]:
    """The groups of one put."""
    random, size = np.random.default_rng(0), SIZES[label]
    return [
        [make_sample(random, size.prompt_tokens, size.response_tokens, version=0) for _ in range(GROUP_SIZE)]
        for _ in range(CALL_GROUPS)
    ]
