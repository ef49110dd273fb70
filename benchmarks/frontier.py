"""How far behind may the samples be? The demo's tasks with several losses, each at several staleness bounds.

python -m benchmarks.frontier

First, parity is checked: with `max_staleness` 0, the strategies `sync` and `async` must train on the same prompts,
answers and rewards, step by step, or nothing else is measured. Then a cell is run for each loss, bound and seed, where
each seed has one initial model. The plan is in `docs/frontier.md`, which was committed before the cells were run;
results are written below the plan. Cells that have finished in `--runs` are read, not repeated.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load_file
from tqdm import tqdm

from benchmarks.frontier_page import Outcome, write_results
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.demo.files import DemoFolder, own_tasks
from rollq.cli.demo.models import TINY
from rollq.cli.demo.settings import DemoOptions, demo_toml, held_out_settings
from rollq.cli.up.supervisor import Role, Supervisor, describe_exit, tail
from rollq.monitor.report.records import read_lines

LOSSES = ("ppo", "decoupled_tis", "cispo", "reinforce")
STALENESS = (0, 1, 4, 8)
SEEDS = (1, 2, 3, 4, 5)
STEPS = 100
PARITY_STEPS = 20
LOGPROB_TOLERANCE = 1e-4
COLLAPSE_RATE = 2e-3
"""The learning rate, four times the demo's, at which an unclipped loss is compared with a clipped loss."""
COLLAPSE_LOSSES = ("ppo", "reinforce")
COLLAPSE_STALENESS = 8
POLL_S = 0.5
EVALUATING = threading.Lock()
"""Held by one evaluation at a time: transformers cannot load models in two threads at once."""
ROLLQ = (sys.executable, "-m", "rollq.cli.main")


class CellFailed(Exception):
    """A role of a cell has ended with an error. The message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run."""

    loss: str
    max_staleness: int
    seed: int
    steps: int = STEPS
    learning_rate: float = TINY.learning_rate

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        return f"{self.loss}-{self.max_staleness}-{self.learning_rate:g}-{self.steps}-{self.seed}"


def registered(losses: Sequence[str], bounds: Sequence[int], seeds: Sequence[int], steps: int) -> list[Cell]:
    """The cells of the plan, seed by seed, so that an interrupted run has complete seeds."""
    cells = []
    for seed in seeds:
        cells += [Cell(loss, bound, seed, steps) for loss in losses for bound in bounds]
        cells += [
            Cell(loss, COLLAPSE_STALENESS, seed, steps, COLLAPSE_RATE) for loss in COLLAPSE_LOSSES if loss in losses
        ]
    return cells


def main() -> None:
    """Check parity, run the cells, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--staleness", type=int, nargs="+", default=list(STALENESS), help="bounds; 0 is needed")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each uses about one core and a half")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for page, picture and figures")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-frontier-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--note", default="", help="what to say about the results, for the page")
    options = parser.parse_args()
    if 0 not in options.staleness:
        parser.error("--staleness: the others are compared with 0; name it too")
    runs = options.runs.absolute()
    bases = {seed: prepared(runs, seed) for seed in options.seeds}
    parity_steps = min(PARITY_STEPS, options.steps)
    difference = check_parity(runs, bases[options.seeds[0]], options.seeds[0], parity_steps)
    cells = registered(options.losses, options.staleness, options.seeds, options.steps)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(outcome_of, runs, bases[cell.seed], cell) for cell in cells]
        try:
            outcomes = [cell.result() for cell in tqdm(running, desc="cells", unit="cell")]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    before = {seed: held_out(base, base.model, seed) for seed, base in bases.items()}
    write_results(options.docs, outcomes, before, (parity_steps, difference), options.steps, options.note)


def prepared(runs: Path, seed: int) -> DemoFolder:
    """A demo's folder with the initial model and the prompts of a seed."""
    folder = DemoFolder(runs / f"base-{seed}")
    if not folder.config.exists():
        shutil.rmtree(folder.root, ignore_errors=True)
        print(f"initial model of seed {seed}", flush=True)
        command = [*ROLLQ, "demo", "--prepare", "--seed", str(seed), "--out", str(folder.root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def check_parity(runs: Path, base: DemoFolder, seed: int, steps: int) -> float:
    """Train with both strategies at `max_staleness` 0, and compare the batches and the rewards of each step.

    Returns the largest difference of a logprob, in nats: the engine's last bits depend on what it computes together.
    Raises `SystemExit` if anything else differs: groups, tokens, versions, masks, advantages or rewards.
    """
    folders = [DemoFolder(runs / f"parity-{strategy}") for strategy in ("sync", "async")]
    for folder, strategy in zip(folders, ("sync", "async"), strict=True):
        if len(list(read_lines(folder.metrics))) < steps:
            shutil.rmtree(folder.root, ignore_errors=True)
            train(folder.root, base, Cell("ppo", 0, seed, steps), strategy, is_recorded=True)
    largest = 0.0
    for step in range(1, steps + 1):
        left, right = (load_file(folder.root / f"record/batches/step-{step:08d}.safetensors") for folder in folders)
        largest = max(largest, float(np.abs(left.pop("logprobs") - right.pop("logprobs")).max(initial=0.0)))
        different = [name for name, array in left.items() if not np.array_equal(array, right[name])]
        if different or largest > LOGPROB_TOLERANCE:
            raise SystemExit(
                f"no parity: step {step} differs in {', '.join(different) or 'logprobs'}; nothing else counts"
            )
    sync, asynchronous = ([line["rewards"] for line in read_lines(folder.metrics)] for folder in folders)
    if sync != asynchronous:
        raise SystemExit("no parity: the rewards of `sync` and `async` differ; nothing else counts")
    print(f"parity: {steps} steps of `sync` and `async` are the same, logprobs to {largest:.1g}", flush=True)
    return largest


def outcome_of(runs: Path, base: DemoFolder, cell: Cell) -> Outcome:
    """Run a cell, unless its folder has an outcome."""
    folder = DemoFolder(runs / cell.name)
    file = folder.root / "outcome.json"
    if not file.exists():
        shutil.rmtree(folder.root, ignore_errors=True)
        train(folder.root, base, cell, "async")
        outcome = Outcome(
            loss=cell.loss,
            max_staleness=cell.max_staleness,
            seed=cell.seed,
            learning_rate=cell.learning_rate,
            held_out=held_out(folder, folder.trained_model, cell.seed),
            **figures(folder.metrics),
        )
        file.write_bytes(orjson.dumps(asdict(outcome)))
    return Outcome(**orjson.loads(file.read_bytes()))


def figures(metrics: Path) -> dict[str, Any]:
    """The figures of a cell's `metrics.jsonl`; staleness and sample sizes count steps after the tenth."""
    steps = list(read_lines(metrics))
    tokens: dict[str, int] = {}
    for step in steps[10:]:
        for age, count in step["staleness_tokens"].items():
            tokens[age] = tokens.get(age, 0) + count
    sizes = [step["effective_sample_size"] for step in steps[10:]]
    oldest = [each[max(each, key=int)] or 0.0 for each in sizes]  # null where weights are not finite
    return {
        "rewards": [step["reward"] for step in steps],
        "mean_staleness": sum(int(age) * count for age, count in tokens.items()) / max(sum(tokens.values()), 1),
        "least_sample_size": min(oldest, default=1.0),
        "mean_clipped": sum(step["clip_fraction"] for step in steps) / len(steps),
        "largest_gradient_norm": max(step["gradient_norm"] for step in steps),
        "mean_kl": sum(step["mismatch_kl"] for step in steps) / len(steps),
    }


def train(root: Path, base: DemoFolder, cell: Cell, strategy: str, *, is_recorded: bool = False) -> None:
    """Train in a new demo's folder `root` from the initial model of `base`. For records, see `benchmarks.recorder`.

    Raises `CellFailed`.
    """
    folder = DemoFolder(root)
    folder.create()
    shutil.copytree(base.model, folder.model)
    options = _options(folder, cell, strategy)
    with EmbeddedServer(folder.server) as server:
        # A loss that collapses is to be seen, not to be stopped.
        more = [f'loss = "{cell.loss}"', "max_mismatch = 1e9", ""]
        folder.config.write_text(demo_toml(options, folder, own_tasks(folder), server.url) + "\n".join(more), "utf-8")
        with Supervisor(folder.logs, _environment(folder), 2.5) as supervisor:
            command = (sys.executable, "-m", "benchmarks.recorder") if is_recorded else (*ROLLQ, "train")
            trainer = supervisor.start("trainer", (*command, str(folder.config)), finishes=True)
            supervisor.start("producer", (*ROLLQ, "produce", str(folder.config)))
            supervisor.start("worker", (*ROLLQ, "work", str(folder.config)))
            while not trainer.finished:
                time.sleep(POLL_S)
                for role in supervisor.roles:
                    _check(role, supervisor)


def _check(role: Role, supervisor: Supervisor) -> None:
    assert role.process is not None
    if role.process.poll() is not None and not role.finished:
        log = supervisor.log(role)
        raise CellFailed(f"{role.name} {describe_exit(role.process.returncode)}; the end of {log}:\n{tail(log)}")


def _environment(folder: DemoFolder) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ROLLQ_")}
    return {**own, **folder.environment()}


def _options(folder: DemoFolder, cell: Cell, strategy: str) -> DemoOptions:
    return DemoOptions(
        out=folder.root,
        model=replace(TINY, learning_rate=cell.learning_rate),
        steps=cell.steps,
        minutes=None,
        seed=cell.seed,
        prompts=None,
        prompt_field="prompt",
        answer_field="answer",
        max_staleness=cell.max_staleness,
        strategy=strategy,
        partial_rollout=False,
        warm_up_steps=1,
        workers=1,
        live=False,
    )


def held_out(folder: DemoFolder, model: Path, seed: int) -> float:
    """Mean held-out reward of a model over both tasks."""
    import torch

    from rollq.cli.demo.held_out import held_out_rewards

    evaluations = {task.name: held_out_settings(task) for task in own_tasks(folder)}
    with EVALUATING:
        torch.set_num_threads(1)
        rewards = held_out_rewards(model, evaluations, seed)
    return sum(rewards.values()) / len(rewards)


if __name__ == "__main__":
    main()
