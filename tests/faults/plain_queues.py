"""The drill without rollq: RQ's own worker, and a buffer of sorted sets from which roles take with ZPOPMIN.

Producers, workers and a trainer as simple as one writes them on a first day, killed at random like those of the chaos
runs. Shows what leases, claims and acknowledged batches are for.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import redis
from rq import Queue
from rq.registry import StartedJobRegistry

from rollq.buffer.store.embedded_server import EmbeddedServer

Kind = Literal["rq", "zpopmin"]
KINDS: tuple[Kind, ...] = ("rq", "zpopmin")
PROMPTS = 400
WORKERS = 3
BATCH = 8
WORK_S = 0.05
"""How long a worker takes for a prompt, and a trainer for a batch."""
PAUSE_S = 0.4
"""Between two kills."""
QUIET_S = 5.0
"""Without a newly trained prompt for this long, nothing more is to be expected."""


class Losses(NamedTuple):
    """What became of the prompts, after `kills` of workers and the trainer."""

    kind: Kind
    kills: int
    trained: int
    lost: int
    twice: int


def generate(url: str, prompt: int) -> None:
    """The job of RQ's worker."""
    time.sleep(WORK_S)
    redis.Redis.from_url(url).zadd("completed", {str(prompt): prompt})


def work_with_zpopmin(url: str) -> None:
    """Take a prompt, generate, and file the result."""
    client: Any = redis.Redis.from_url(url)
    while True:
        taken = client.bzpopmin("pending", 1)
        if taken:
            time.sleep(WORK_S)
            client.zadd("completed", {taken[1]: taken[2]})


def work_with_rq(url: str) -> None:
    """Become RQ's worker."""
    from rq import Worker

    client = redis.Redis.from_url(url)
    Worker([Queue("prompts", connection=client)], connection=client).work(logging_level="ERROR")


def train(url: str, log: str) -> None:
    """Take what is completed, train on it, and record it."""
    client: Any = redis.Redis.from_url(url)
    while True:
        batch = client.zpopmin("completed", BATCH)
        time.sleep(WORK_S)
        if batch:
            with Path(log).open("a") as file:
                file.write("".join(f"{int(score)}\n" for _, score in batch))


ROLES: dict[str, Callable[..., None]] = {"rq": work_with_rq, "zpopmin": work_with_zpopmin, "train": train}


def start(role: str, *args: str) -> subprocess.Popen[bytes]:
    """A role as a process, the leader of its group: RQ's worker forks."""
    command = [sys.executable, "-m", "faults.plain_queues", role, *args]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a role and what it has forked, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def drill(kind: Kind, seed: int, folder: Path, prompts: int = PROMPTS) -> Losses:
    """Train on `prompts` prompts while workers and the trainer are killed, and count what is lost."""
    rng, log, kills = random.Random(seed), folder / "trained", 0
    log.touch()
    with EmbeddedServer(folder / "server") as server:
        client = redis.Redis.from_url(server.url)
        _enqueue(kind, client, server.url, prompts)
        roles = [(kind, server.url)] * WORKERS + [("train", server.url, str(log))]
        processes = [start(*role) for role in roles]
        while _progresses(log):
            index = rng.randrange(len(roles))
            kill(processes[index])
            kills += 1
            processes[index] = start(*roles[index])
        if kind == "rq":  # what its maintenance does minutes later
            StartedJobRegistry(queue=Queue("prompts", connection=client)).cleanup(time.time() + 1e6)
            while _progresses(log):
                pass
        for process in processes:
            kill(process)
    counts = Counter(log.read_text().split())
    return Losses(kind, kills, len(counts), prompts - len(counts), sum(n > 1 for n in counts.values()))


def _progresses(log: Path) -> bool:
    """Wait for the time of a kill; False when no prompt was trained for `QUIET_S`."""
    before, started = log.read_text(), time.monotonic()
    time.sleep(PAUSE_S)
    while log.read_text() == before:
        if time.monotonic() - started > QUIET_S:
            return False
        time.sleep(PAUSE_S / 10)
    return True


def _enqueue(kind: Kind, client: redis.Redis, url: str, prompts: int) -> None:
    if kind == "zpopmin":
        client.zadd("pending", {str(prompt): prompt for prompt in range(prompts)})
        return
    queue = Queue("prompts", connection=client)
    queue.enqueue_many([Queue.prepare_data(generate, args=(url, prompt)) for prompt in range(prompts)])


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
