"""Tokens per second through rollq, compared with the same vLLM driven directly with the same prompts.

The rollq side has a producer, a worker with vLLM and a server as processes, with tickets, leases, frames, claims and
commits, and never changes the weights. Both sides run from start to end and take turns of a few seconds, while the
other side's processes are stopped: the speed of a shared machine changes by the minute, and by more than the difference
between the sides. All processes share a session, because Linux schedules each session as a unit.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson
from tqdm import tqdm

from benchmarks.generation import ENGINE_ARGS, GROUP_SIZE, IN_FLIGHT, MAX_TOKENS, TEMPERATURE, write_files
from benchmarks.results import Result
from benchmarks.world import TASK, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.weights.store import locate_weights

Turn = Callable[[float], float]
"""Runs a side for at least the given number of seconds; returns tokens per second."""

WARM_UP_S = 5.0
STEPS = 600
"""The allowed staleness, which exceeds the number of claimed steps because the weights stay at step 0."""
SETTLE_S = 2.0
"""The seconds at the start of each turn that are not counted."""
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(quick: bool) -> list[Result]:
    """One result: the ratio of the two sides in each pair of turns."""
    os.environ.update(ENVIRONMENT)
    seconds, turns = (4.0, 2) if quick else (6.0, 24)
    with TemporaryDirectory(prefix="rollq-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        write_files(folder)
        directly = stack.enter_context(direct_side(folder))
        through_rollq = stack.enter_context(rollq_side(folder))
        bar = tqdm(range(turns), "turns", leave=False)
        direct, rollq = zip(*((directly(seconds), through_rollq(seconds)) for _ in bar), strict=True)
    return [
        Result(
            name="throughput",
            what=f"vLLM through rollq over vLLM driven directly, {IN_FLIGHT} groups of {GROUP_SIZE} in flight",
            unit="share",
            target=0.9,
            better="higher",
            values=tuple(ours / theirs for ours, theirs in zip(rollq, direct, strict=True)),
            details={"direct_tokens_per_s": float(np.median(direct)), "rollq_tokens_per_s": float(np.median(rollq))},
        )
    ]


class Processes:
    """The processes of one side, each the leader of a process group."""

    def __init__(self, running: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
        self._running = running
        self._log = log

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Let the processes run inside the context, and stop them after it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._running:
            os.killpg(process.pid, number)

    def check(self) -> None:
        """Raise `RuntimeError`, with the end of the log, if a process has exited."""
        if any(process.poll() is not None for process in self._running):
            raise RuntimeError(self._log.read_text()[-4000:])

    def end(self) -> None:
        """Terminate all processes, and wait for them."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                process.terminate()
        for process in self._running:
            process.wait(30)


@contextmanager
def processes(commands: Sequence[Sequence[str]], log: Path) -> Iterator[Processes]:
    """Run Python modules, each with its arguments, as processes."""
    with log.open("wb") as output:
        running = Processes(
            [
                subprocess.Popen([sys.executable, "-m", *command], stderr=output, process_group=0)
                for command in commands
            ],
            log,
        )
    try:
        yield running
    finally:
        running.end()


@contextmanager
def direct_side(folder: Path) -> Iterator[Turn]:
    """Run `benchmarks.directly`, stopped outside its turns."""
    with processes([("benchmarks.directly", str(folder))], folder / "directly.log") as running:
        while not (folder / "tokens").exists():
            running.check()
            time.sleep(0.1)
        time.sleep(1.0)
        tokens = np.memmap(folder / "tokens", np.int64, "r", shape=(1,))

        def turn(seconds: float) -> float:
            with running.resumed():
                time.sleep(SETTLE_S)
                before, started_s = int(tokens[0]), time.monotonic()
                time.sleep(seconds)
                running.check()
                return (int(tokens[0]) - before) / (time.monotonic() - started_s)

        turn(WARM_UP_S)
        yield turn


@contextmanager
def rollq_side(folder: Path) -> Iterator[Turn]:
    """Run a producer and a worker, stopped outside their turns, and a trainer that only claims, reads and commits."""
    rules = TaskRules(
        batch_groups=IN_FLIGHT, group_size=GROUP_SIZE, max_staleness=STEPS, resume="fresh", stragglers="expire"
    )
    with server() as redis, Buffer.connect(redis.url, "throughput") as buffer:
        buffer.create_run()
        buffer.register_task(TASK, rules)
        weights = locate_weights(buffer, folder / "model")
        held = buffer.begin_epoch(
            trainer_id="bench", launch_id="bench", from_step=0, uri=weights.uri, digest=weights.digest
        )
        write_config(folder, buffer.run, redis.url, rules)
        config = str(folder / "rollq.toml")
        roles = [("rollq.cli.main", "produce", config), ("rollq.cli.main", "work", config)]
        steps = count(1)
        with processes(roles, folder / "roles.log") as running, buffer.events() as events:

            def batch() -> int:
                step = next(steps)
                while not isinstance(claimed := buffer.claim(held, step, {TASK: IN_FLIGHT}), Claimed):
                    events.wait(1.0)
                    running.check()
                buffer.fetch(claimed.groups)
                buffer.commit(held, step)
                return sum(group.tokens for group in claimed.groups)

            def turn(seconds: float) -> float:
                with running.resumed():
                    settled_s = time.monotonic() + SETTLE_S
                    batch()
                    while time.monotonic() < settled_s:
                        batch()
                    tokens, started_s, now_s = 0, time.monotonic(), 0.0
                    while now_s < started_s + seconds:
                        tokens += batch()
                        now_s = time.monotonic()
                    return tokens / (now_s - started_s)

            turn(WARM_UP_S)
            yield turn


def write_config(folder: Path, run: str, url: str, rules: TaskRules) -> None:
    """Write the `rollq.toml` of producer and worker."""
    arguments = ", ".join(f"{name} = {orjson.dumps(value).decode()}" for name, value in ENGINE_ARGS.items())
    (folder / "rollq.toml").write_text(
        f"""
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.{TASK}]
prompts = "prompts.jsonl"
judge = "exact_match"
batch_groups = {rules.batch_groups}
group_size = {rules.group_size}
max_staleness = {rules.max_staleness}
staleness.stragglers = "{rules.stragglers}"
batches.resume = "{rules.resume}"
max_tokens = {MAX_TOKENS}
temperature = {TEMPERATURE}
[producer]
over_sample = 1.0
[worker]
engine = "vllm"
samples_in_flight = {GROUP_SIZE * IN_FLIGHT}
grace_s = 0
[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ {arguments} }}
"""
    )
