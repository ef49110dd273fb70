"""How long a claim takes beside a dashboard, metrics, an archiver, a tracker and a command: at work, hung, and killed.

The tracker is MLflow, whose server never answers, and the command of `on_change` never ends.
"""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
from tqdm import tqdm

from benchmarks.results import Result
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.common.ports import free_port
from rollq.buffer.rules.settings import TaskRules
from rollq.consumer.tracker_settings import MlflowSettings
from rollq.consumer.trackers.host import TrackerHost
from rollq.consumer.trackers.tracker import Entry, Tracker

BATCH_GROUPS = 32
GROUP_SIZE = 8
GROUPS = 10_000
CLAIMS = 40
AT_ONCE = 100
"""Groups that are put at a time."""
CLAIMS_BETWEEN_KILLS = 8
"""A killed process restarts during these claims."""
RULES = TaskRules(
    batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, max_staleness=100_000, max_uncheckpointed_steps=100_000,
    archive=True,
)  # fmt: skip
CALLED = "called"
"""The file to which the command of `on_change` adds a line."""
ROLLQ = (sys.executable, "-m", "rollq.cli.main")
PAGES = (
    "", "api/status", "api/history", "api/groups?q=17", "api/groups?status=completed&limit=50", "metrics",
    f"api/groups/{TASK}/{GROUPS}/tokens?sample=0",
)  # fmt: skip


def measure(quick: bool) -> list[Result]:
    """Three results: with all of them at work, hung one after another, and killed one after another."""
    groups, claims, repetitions = (200, 5, 2) if quick else (GROUPS, CLAIMS, 7)
    alone: list[float] = []
    beside: dict[str, list[list[float]]] = {"at work": [], "hung": [], "killed": []}
    with server() as running, run(running.url, "beside", RULES) as (buffer, epoch), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = _write_settings(folder, running.url)
        trainer = _Trainer(buffer, epoch)
        trainer.fill(groups)
        tracker = TrackerHost("mlflow", partial(_mlflow, stack.enter_context(_silent_server())))
        for _ in tqdm(range(repetitions), desc="repetitions", leave=False, disable=None):
            alone += trainer.claims(claims)
            for condition, times in beside.items():
                buffer.replace_reported_state(f"before turn {len(times)}, {condition}")
                with _bystanders(settings, folder / CALLED) as found:
                    act = {"at work": lambda: None, "hung": found.hang_one, "killed": found.kill_one}[condition]
                    times.append(trainer.claims(claims, act, tracker))
    return [
        Result(
            name=f"beside-{condition.replace(' ', '-')}",
            what=f"longest of {claims} claims beside dashboard, metrics, archiver, tracker and command, {condition}, "
            f"over the median claim alone, at {groups:,} groups",
            unit="ms",
            target=100.0,
            better="lower",
            values=tuple(max(1e-3, max(turn) - median(alone)) for turn in times),
            details={**_spread("alone", alone), **_spread("beside", [each for turn in times for each in turn])},
        )
        for condition, times in beside.items()
    ]


def _spread(name: str, times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and longest of times."""
    p99 = float(np.quantile(times_ms, 0.99))
    return {f"{name}_median_ms": median(times_ms), f"{name}_p99_ms": p99, f"{name}_longest_ms": max(times_ms)}


def _write_settings(folder: Path, url: str) -> Path:
    (folder / "archive").mkdir()
    path = folder / "rollq.toml"
    path.write_text(
        f'run = "beside"\n[redis]\nbuffer_url = "{url}"\n[archive]\nurl = "{folder / "archive"}"\n'
        f'[tasks.{TASK}]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = {BATCH_GROUPS}\n'
        f'group_size = {GROUP_SIZE}\n[worker]\nengine = "simulated"\n'
        f'[monitor]\non_change = ["sh", "-c", "echo >> {CALLED}; exec sleep 60"]\non_change_after_s = 0.0\n'
    )
    return path


class _Trainer:
    """Claims, commits and checkpoints, and puts as many groups as it claims."""

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch) -> None:
        self._buffer, self._epoch = buffer, epoch
        self._step = self._admitted = 0
        generator = np.random.default_rng(1)
        self._samples = [make_sample(generator, 16, 64, 0) for _ in range(GROUP_SIZE)]

    def fill(self, groups: int) -> None:
        for start in range(0, groups, AT_ONCE):
            wanted = min(AT_ONCE, groups - start)
            leases = admit_and_lease(self._buffer, self._epoch.epoch, self._admitted, wanted, 0)
            self._admitted += wanted
            self._buffer.put(results_of(leases, [self._samples] * wanted))

    def claims(
        self, wanted: int, act: Callable[[], object] = lambda: None, tracker: TrackerHost | None = None
    ) -> list[float]:
        """The times of `wanted` claims in ms; before each claim, `act` may stop or kill a process."""
        times = []
        for _ in range(wanted):
            act()
            self._step += 1
            started = time.perf_counter()
            claimed = self._buffer.claim(self._epoch, self._step, {TASK: BATCH_GROUPS})
            times.append((time.perf_counter() - started) * 1000)
            if not isinstance(claimed, Claimed):
                raise RuntimeError(f"nothing to claim: {claimed}")
            if tracker is not None:
                tracker.log(Entry(self._step, {"reward": 0.5}))
            self._buffer.commit(self._epoch, self._step)
            self._buffer.checkpoint(self._epoch, self._step)
            self.fill(BATCH_GROUPS)
        return times


@contextmanager
def _silent_server() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _mlflow(url: str) -> Tracker:
    from rollq.consumer.trackers.mlflow import Mlflow

    return Mlflow(MlflowSettings(tracking_uri=url), "beside")


class _Bystanders:
    """The processes. When the next process is chosen, a killed process restarts, and a stopped process continues."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._chosen, self._processes = count(), [_start(command) for command in commands]
        self._hung: subprocess.Popen[bytes] | None = None
        self._claims = 0

    def hang_one(self) -> None:
        self._continue()
        time.sleep(random.uniform(0, 0.05))  # at any point of what it does
        self._hung = self._processes[next(self._chosen) % len(self._processes)]
        self._hung.send_signal(signal.SIGSTOP)

    def kill_one(self) -> None:
        self._claims += 1
        if self._claims % CLAIMS_BETWEEN_KILLS:
            return
        time.sleep(random.uniform(0, 0.05))  # at any point of what it does
        at = next(self._chosen) % len(self._processes)
        self._processes[at].kill()
        self._processes[at].wait()
        self._processes[at] = _start(self._commands[at])

    def end(self) -> None:
        self._continue()
        for process in self._processes:
            process.kill()
            process.wait()

    def _continue(self) -> None:
        if self._hung is not None:
            self._hung.send_signal(signal.SIGCONT)
            self._hung = None


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*ROLLQ, *command], stderr=subprocess.DEVNULL, env={**os.environ, "ROLLQ_DASHBOARD_TOKEN": ""}
    )


@contextmanager
def _bystanders(settings: Path, called: Path) -> Iterator[_Bystanders]:
    """Run all of them, with a visitor of the dashboard who asks for one page after another, and the command, which
    hangs. `called` grows when the command is called.
    """
    port, other = free_port("127.0.0.1"), free_port("127.0.0.1")
    commands = [
        ("dashboard", str(settings), "--port", str(port)),
        ("metrics", str(settings), "--port", str(other)),
        ("archive", str(settings)),
    ]
    address = f"http://127.0.0.1:{port}/"
    visitor = multiprocessing.get_context("spawn").Process(target=_visit, args=(address,), daemon=True)
    called.unlink(missing_ok=True)
    found = _Bystanders(commands)
    try:
        while not (_answers(address) and called.exists()):
            time.sleep(0.1)
        visitor.start()
        yield found
    finally:
        if visitor.is_alive():
            visitor.kill()
            visitor.join()
        found.end()


def _answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=1) as answer:
        return int(answer.status) == 200
    return False


def _visit(address: str) -> None:
    """Ask for one page after another, without a pause."""
    for number in count():
        with suppress(OSError), urllib.request.urlopen(address + PAGES[number % len(PAGES)], timeout=2) as answer:
            answer.read()
