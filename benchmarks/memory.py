"""`python -m benchmarks.memory`: compare the sizing formula of docs/guide/operations.md with full runs.

Each run has one task of 64 groups a batch, at most one weight sync behind, with a checkpoint every five steps. It
generates as far ahead as the live weights allow and trains for ten steps; the server's memory is read whenever the run
is as full as it gets. Then the append-only file is rewritten while the run continues, and the copied pages are read.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Sample
from rollq.monitor.doctor.examine import measured_tasks
from rollq.monitor.doctor.sizing import live_groups, used_bytes
from rollq.monitor.text.tables import aligned
from rollq.monitor.text.units import in_words

BATCH = 64
CHECKPOINT_EVERY = 5
STEPS = 10
PUT_GROUPS = 16
SHAPES = ((4, 64, 128), (8, 100, 400), (8, 512, 2048), (8, 1024, 8192))
"""The samples of a group, the prompt tokens, and the most new tokens; answers have at least half of these."""
HEADER = ("server", "payload", "groups", "INFO used_memory", "formula", "used / formula", "copied by a rewrite")


@dataclass
class FullRun:
    """A run that is kept as full as its settings allow. `peak_bytes` is the most memory that INFO has shown."""

    buffer: Buffer
    epoch: TrainerEpoch
    shape: tuple[int, int, int]
    admitted: int = 0
    peak_bytes: int = 0

    def train(self, first: int, last: int) -> None:
        """Train the steps from `first` to `last`, with a checkpoint every few steps."""
        for step in range(first, last + 1):
            self._produce(version=step - 1)
            claimed = self.buffer.claim(self.epoch, step, {TASK: BATCH})
            if not isinstance(claimed, Claimed):
                raise RuntimeError(f"the batch of step {step} is not full: {claimed}")
            self.buffer.publish(self.epoch, step, uri="", digest="")
            self._produce(version=step)  # before the commit, as a producer may: the fullest moment
            self.peak_bytes = max(self.peak_bytes, self.used_bytes())
            self.buffer.commit(self.epoch, step)
            if step % CHECKPOINT_EVERY == 0:
                self.buffer.checkpoint(self.epoch, step)

    def used_bytes(self) -> int:
        """`used_memory` of INFO."""
        return int(self.buffer.client.info("memory")["used_memory"])

    def copied_bytes(self, step: int) -> int:
        """Bytes of pages that a rewrite of the append-only file copied while `step` was trained."""
        self.buffer.client.bgrewriteaof()
        self.train(step, step)
        while self.buffer.client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.1)
        return int(self.buffer.client.info("persistence")["aof_last_cow_size"])

    def _produce(self, version: int) -> None:
        groups = make_groups(self.shape, version)
        target = BATCH * (version + self.buffer.rules(TASK).stale_threshold)
        while self.admitted < target:
            leases = admit_and_lease(self.buffer, self.epoch.epoch, self.admitted, PUT_GROUPS, version)
            self.buffer.put(results_of(leases, groups))
            self.admitted += PUT_GROUPS


def make_groups(shape: tuple[int, int, int], version: int) -> list[list[Sample]]:
    """The groups of one put, with answers of random lengths."""
    group_size, prompt_tokens, new_tokens = shape
    random = np.random.default_rng(version)
    lengths = random.integers(new_tokens // 2, new_tokens, size=(PUT_GROUPS, group_size), endpoint=True)
    return [[make_sample(random, prompt_tokens, int(length), version) for length in row] for row in lengths]


def measure(server: EmbeddedServer, shape: tuple[int, int, int]) -> list[str]:
    """Fill one run, and return a row of the table without the server's name."""
    rules = TaskRules(batch_groups=BATCH, group_size=shape[0], max_uncheckpointed_steps=CHECKPOINT_EVERY)
    with run(server.url, "full", rules) as (buffer, epoch):
        full = FullRun(buffer, epoch, shape)
        buffer.client.config_set("auto-aof-rewrite-percentage", 0)
        empty_bytes = full.used_bytes()
        full.train(1, STEPS)
        copied_bytes = full.copied_bytes(STEPS + 1)
        (size,) = measured_tasks(buffer).values()
    used, formula = full.peak_bytes - empty_bytes, used_bytes([size])
    return [
        in_words(size.payload_bytes),
        str(live_groups(size)),
        in_words(used),
        in_words(formula),
        f"{used / formula:.2f}",
        f"{100 * copied_bytes / used:.0f} %",
    ]


def rows(shapes: Sequence[tuple[int, int, int]]) -> Iterator[list[str]]:
    """The rows of the table: for the embedded Valkey, and for the system's Redis if there is one."""
    installed = shutil.which("redis-server")
    for name, binary in {"Valkey": None, **({"Redis": Path(installed)} if installed else {})}.items():
        for shape in shapes:
            with tempfile.TemporaryDirectory() as directory, EmbeddedServer(directory, binary=binary) as server:
                version = server_version(server)
                yield [f"{name} {version}", *measure(server, shape)]


def server_version(server: EmbeddedServer) -> str:
    """The version that the server reports of itself."""
    with Buffer.connect(server.url, "full") as buffer:
        info = buffer.client.info("server")
    return str(info.get("valkey_version", info["redis_version"]))


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Only small groups, to check that the measurement runs.")
def main(quick: bool) -> None:
    for line in aligned([HEADER, *rows(SHAPES[:1] if quick else SHAPES)]):
        click.echo(line)


if __name__ == "__main__":
    main()
