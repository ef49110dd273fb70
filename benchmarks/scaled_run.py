"""A run of several workers with simulated GPUs: a server, `rollq produce`, `rollq work` and a trainer, as processes.

The roles may come from another source tree, to compare two states of rollq in one run: the environment variable
`AGAINST` names it. Only the engine, the prompts, the batch and the staleness are set; `groups_in_flight` is only for
the other tree.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson
from safetensors.numpy import save_file

from benchmarks.engine_record import EngineRecord
from benchmarks.saturating import GROUP_SIZE, prompt_ids
from benchmarks.world import TASK, server
from rollq.buffer.buffer import Buffer

ROOT = Path(__file__).parents[1]
PACKAGES = ("buffer", "producer", "workers", "consumer", "monitor", "cli", "integrations")
RUN = "scaling"
BATCH_GROUPS = 64
SAMPLES = GROUP_SIZE * BATCH_GROUPS
PROMPTS = 20_000
PROMPT_TOKENS = 2
KNOWN_ORDER = "benchmarks.saturating.KnownPrompts"
START_S = 120.0
"""The longest time for workers to start, in seconds."""
CREATE_RUN = """
import sys
from rollq.buffer.buffer import Buffer

with Buffer.connect(*sys.argv[1:]) as buffer:
    buffer.create_run()
"""


def trees() -> Mapping[str, Path]:
    """The source trees whose roles are measured, in turns: this one, and the tree in `AGAINST`."""
    against = os.environ.get("AGAINST")
    if not against:
        return {"": ROOT}
    if not (Path(against) / "workers" / "rollq").is_dir():
        raise SystemExit(f"AGAINST={against}: not a source tree of rollq, such as `git worktree add` makes")
    return {"": ROOT, "against": Path(against).resolve()}


@dataclass(frozen=True, slots=True)
class Gpu:
    """The engine of one worker. `full` sequences run at full speed; more share it."""

    tokens_per_s: float
    full: int = 64
    slots: int = 256

    @property
    def most_tokens_per_s(self) -> float:
        """The speed of all sequences together."""
        return self.tokens_per_s * self.full


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers, the task and the trainer. `lengths` are in tokens; each sample draws one. With `known_prompts`,
    there are only that many prompts, all answers to a prompt have the length of its row, and statistics are kept.
    `groups_in_flight` is the setting of a tree that admits by group; None leaves it out.
    """

    gpus: tuple[Gpu, ...]
    lengths: Sequence[int]
    max_staleness: int
    steps: int
    batch_groups: int = BATCH_GROUPS
    train_s: float = 0.0
    groups_in_flight: int | None = None
    group_size: int = GROUP_SIZE
    partial_rollout: bool = False
    known_prompts: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the trainer: when it was committed, its groups, and the lengths of their answers."""

    at_s: float
    groups: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the batch's answers."""
        return sum(self.lengths)


@dataclass(slots=True)
class Roles:
    """The processes of a run. `steps` grows while they train. `spread` is the task's setting; None leaves it out."""

    plan: Plan
    folder: Path
    url: str
    tree: Path
    spread: str | None = None
    steps: list[Step] = field(default_factory=list)
    workers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    others: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def create_run(self) -> None:
        """Create the run with the code of the roles, whose schema may differ from this tree's."""
        command = [sys.executable, "-c", CREATE_RUN, self.url, RUN]
        subprocess.run(command, env=self._environment, check=True)

    def add_worker(self) -> int:
        """Start a worker with the engine of its place in the plan; returns the place."""
        number = len(self.workers)
        gpu = self.plan.gpus[number]
        options = {
            "record": str(self.folder / f"{number}.record"),
            "tokens_per_s": gpu.tokens_per_s,
            "most_tokens_per_s": gpu.most_tokens_per_s,
            "max_sequences": gpu.slots,
            "lengths": list(self.plan.lengths),
            "group_size": self.plan.group_size,
            "by_row": self.plan.known_prompts is not None,
        }
        by_hand = self.plan.groups_in_flight
        lines = [
            "[worker]",
            'engine = "benchmarks.saturating.SaturatingEngine"',
            f'name = "gpu{number}"',
            *([] if by_hand is None else [f"groups_in_flight = {by_hand}"]),
            "[worker.options]",
            *(f"{name} = {json.dumps(value)}" for name, value in options.items()),
        ]
        path = self._settings(f"worker-{number}", lines)
        self.workers.append(self._start(f"worker-{number}", "rollq.cli.main", "work", str(path)))
        return number

    def wait_for_workers(self) -> None:
        """Wait until all workers have reported that they serve."""
        deadline_s = time.monotonic() + START_S
        while self.workers_that_report() < len(self.workers):
            self._check()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"workers did not start; the end of a log:\n{self.log('worker-0')}")
            time.sleep(0.05)

    def train(self, at_step: Callable[["Roles"], None] = lambda _: None) -> None:
        """Train all steps; `at_step` is called after each."""
        produce = self._start("producer", "rollq.cli.main", "produce", str(self._settings("producer", [])))
        arguments = (self.url, RUN, str(self.folder / "model"), str(self.plan.steps), str(self.plan.train_s))
        trainer = self._start("trainer", "benchmarks.scaling_trainer", *arguments, stdout=subprocess.PIPE)
        self.others += [produce, trainer]
        assert trainer.stdout is not None
        for line in trainer.stdout:
            read = orjson.loads(line)
            self.steps.append(Step(read["at_s"], tuple(read["groups"]), tuple(read["lengths"])))
            at_step(self)
        if trainer.wait() or len(self.steps) < self.plan.steps:
            raise RuntimeError(f"the trainer has ended; the end of its log:\n{self.log('trainer')}")

    def records(self) -> list[EngineRecord]:
        """The work of each worker's engine so far."""
        paths = [self.folder / f"{number}.record" for number in range(len(self.workers))]
        return [EngineRecord.parse(path.read_text() if path.exists() else "") for path in paths]

    def kill(self, number: int) -> float:
        """Kill a worker; returns the time."""
        at_s = time.monotonic()
        self.workers[number].send_signal(signal.SIGKILL)
        self.workers[number].wait()
        return at_s

    def workers_that_report(self) -> int:
        """How many workers have reported recently."""
        with Buffer.connect(self.url, RUN) as buffer:
            return len(buffer.workers())

    def log(self, name: str) -> str:
        """The end of a role's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """End all processes."""
        for process in (*self.others, *self.workers):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _check(self) -> None:
        for number, process in enumerate(self.workers):
            if process.poll() is not None:
                raise RuntimeError(f"worker {number} has ended; the end of its log:\n{self.log(f'worker-{number}')}")

    def _settings(self, name: str, lines: Sequence[str]) -> Path:
        path = self.folder / f"{name}.toml"
        task = {
            "prompts": "prompts.jsonl",
            "rows.answer_field": "",
            "judge": "benchmarks.saturating.judge",
            "batch_groups": self.plan.batch_groups,
            "group_size": self.plan.group_size,
            "max_staleness": self.plan.max_staleness,
            "max_tokens": max(self.plan.lengths),
            "staleness.partial_rollout": self.plan.partial_rollout,
            **({} if self.plan.known_prompts is None else {"curriculum.prompt_order": KNOWN_ORDER}),
            **({} if self.spread is None else {"limits.spread": self.spread}),
        }
        head = [f'run = "{RUN}"', "[redis]", f'buffer_url = "{self.url}"', f"[tasks.{TASK}]"]
        path.write_text("\n".join([*head, *(f"{key} = {json.dumps(value)}" for key, value in task.items()), *lines]))
        return path

    def _start(self, name: str, module: str, *arguments: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", module, *arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=self.folder, env=self._environment, stderr=log, stdout=stdout or log)

    @property
    def _environment(self) -> dict[str, str]:
        paths = [*(str(self.tree / package) for package in PACKAGES), str(ROOT)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def started(plan: Plan, tree: Path, workers: int | None = None, *, spread: str | None = None) -> Iterator[Roles]:
    """The first `workers` workers of a plan, or all, on a new server; they wait for the trainer."""
    with ExitStack() as stack:
        running = stack.enter_context(server())
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollq-bench-")))
        rows = range(plan.known_prompts or PROMPTS)
        prompts = [orjson.dumps({"prompt": "?", "prompt_ids": prompt_ids(row)}) for row in rows]
        (folder / "prompts.jsonl").write_bytes(b"\n".join(prompts))
        (folder / "model").mkdir()
        save_file({"weight": np.zeros(8, np.float32)}, folder / "model" / "model.safetensors")
        roles = Roles(plan, folder, running.url, tree, spread)
        stack.callback(roles.end)
        roles.create_run()
        for _ in range(len(plan.gpus) if workers is None else workers):
            roles.add_worker()
        roles.wait_for_workers()
        yield roles


def rate(steps: Sequence[Step], warm_up: int) -> float:
    """Tokens per second of the steps after the first `warm_up`."""
    return sum(step.tokens for step in steps[warm_up:]) / (steps[-1].at_s - steps[warm_up - 1].at_s)
