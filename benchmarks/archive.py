"""The cost of an archive: `put`, `claim` and `fetch` while an archiver is at work, compared with a run without an
archive."""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules

GROUPS = 32
GROUP_SIZE = 8
TOKENS = 300
REPETITIONS = 150


def measure(quick: bool) -> list[Result]:
    """One result: the time of the calls of a step with an archive, as a share of the time without one."""
    tokens, repetitions = (20, 4) if quick else (TOKENS, REPETITIONS)
    with server() as running, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = []
        for name, archive in (("without", False), ("with", True)):
            rules = TaskRules(
                batch_groups=GROUPS, group_size=GROUP_SIZE, max_staleness=100_000, max_uncheckpointed_steps=100_000,
                archive=archive,
            )  # fmt: skip
            sides.append(_Steps(*stack.enter_context(run(running.url, name, rules)), tokens))
        settings = folder / "rollq.toml"
        settings.write_text(
            f'run = "with"\n[redis]\nbuffer_url = "{running.url}"\n[archive]\nurl = "{folder}"\n'
            f'[tasks.{TASK}]\nprompts = "p.jsonl"\nbatch_groups = {GROUPS}\n'
        )
        archiver = subprocess.Popen(
            [sys.executable, "-m", "rollq.cli.main", "archive", str(settings)], stderr=subprocess.DEVNULL
        )
        stack.callback(archiver.wait)
        stack.callback(archiver.terminate)
        without, beside = sides
        take_turns(2, without.seconds, beside.seconds)
        of_without, of_beside = take_turns(repetitions, without.seconds, beside.seconds)
        while not list(folder.rglob("*.parquet")):  # it must have been at work
            if archiver.poll() is not None:
                raise RuntimeError("the archiver has ended")
            time.sleep(0.1)
    return [
        Result(
            name="archive",
            what=f"put, claim and fetch of {GROUPS} groups with an archiver at work, against a run without an archive",
            unit="times as long",
            target=1.05,
            better="lower",
            values=ratios(of_beside, of_without),
            details={"without_ms": sorted(of_without)[len(of_without) // 2] * 1e3},
        )
    ]


class _Steps:
    """Steps of a run, one after another. Only the calls that are compared are timed."""

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch, tokens: int) -> None:
        self._buffer, self._epoch = buffer, epoch
        self._step = 0
        generator = np.random.default_rng(1)
        self._samples = [make_sample(generator, 16, tokens, 0) for _ in range(GROUP_SIZE)]

    def seconds(self) -> float:
        """The time of put, claim and fetch of a step's groups."""
        leases = admit_and_lease(self._buffer, self._epoch.epoch, self._step * GROUPS, GROUPS, self._step)
        self._step += 1
        results = results_of(leases, [self._samples] * GROUPS)
        started = time.perf_counter()
        self._buffer.put(results)
        claimed = self._buffer.claim(self._epoch, self._step, {TASK: GROUPS})
        if not isinstance(claimed, Claimed):
            raise RuntimeError(f"nothing to claim: {claimed}")
        self._buffer.fetch(claimed.groups)
        elapsed_s = time.perf_counter() - started
        self._buffer.publish(self._epoch, self._step, uri="", digest=str(self._step))
        self._buffer.commit(self._epoch, self._step)
        self._buffer.checkpoint(self._epoch, self._step)
        return elapsed_s
