"""Does the demo learn? Runs it asynchronously, synchronously, and with shuffled rewards, once each per seed.

python -m benchmarks.learning --seeds 1 2 3

Writes `learning.png` (reward curves of each seed and their mean), `learning.json` and `learning.md` (a row per run)
into `docs/`; the folders of the runs are kept under `--runs`.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from matplotlib.figure import Figure

from benchmarks.machine import describe
from rollq.monitor.records import StepRecord, read_steps
from rollq.monitor.report import running_mean

MODES = {
    "asynchronous": ("#0072b2", ()),
    "synchronous": ("#009e73", ("--strategy", "sync")),
    "rewards shuffled (control)": ("#d55e00", ("--shuffle-rewards",)),
}
"""The modes that are compared: name -> colour, and options of `rollq demo`."""

SMOOTHING_STEPS = 20
INTRODUCTION = """\
Do models learn from what rollq delivers? Each row is one run of `rollq demo`: a Qwen3 with 0.3 million parameters, made
and warmed up for the seed, then GRPO on two-digit sums and digit sorting, 32 groups of 8 samples per step. Rewards are
held-out, sampled at temperature 1, the mean of both tasks. 60 % of the answers in the warm-up are wrong on purpose, so
the model knows the right answer but does not prefer it. Asynchronous runs have `max_staleness` 1, synchronous ones 0.
The control shuffles the rewards within each batch: it has nothing to learn, and loses what it knew.

`python -m benchmarks.learning --seeds 11 12 13` writes this page, the picture and `learning.json`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One finished demo."""

    mode: str
    seed: int
    steps: Sequence[StepRecord]
    summary: dict[str, Any]
    wall_s: float

    @property
    def row(self) -> dict[str, Any]:
        """The run's row in the table. Rewards are held-out, averaged over tasks."""
        before, after = (self.summary["held_out"][when]["mean"] for when in ("before", "after"))
        return {
            "mode": self.mode,
            "seed": self.seed,
            "steps": self.summary["steps"],
            "before": before,
            "after": after,
            "gain": after - before,
            "staleness_1_share": self.summary["staleness_shares"].get("1", 0.0),
            "train_s": self.summary["train_s"],
            "wall_s": self.wall_s,
        }


def main() -> None:
    """Run all modes and seeds, and write the plot and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for plot and tables")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-demo-learning-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    runs = [
        run_demo(mode, seed, options.steps, options.runs / f"{mode.split()[0]}-{seed}")
        for seed in options.seeds
        for mode in MODES
    ]
    write_results(runs, options.docs)


def run_demo(mode: str, seed: int, steps: int, folder: Path) -> Run:
    """Run the demo once in a separate process, with its output shown."""
    print(f"\n== {mode}, seed {seed}", flush=True)
    started_s = time.monotonic()
    command = [sys.executable, "-m", "rollq.cli.main", "demo", "--no-live", "--seed", str(seed), "--steps", str(steps)]
    subprocess.run([*command, "--out", str(folder), *MODES[mode][1]], check=True)
    summary = orjson.loads((folder / "summary.json").read_bytes())
    return Run(mode, seed, read_steps(folder / "trainer" / "metrics.jsonl"), summary, time.monotonic() - started_s)


def write_results(runs: Sequence[Run], docs: Path) -> None:
    """Write `learning.png`, `learning.json` and `learning.md` into `docs`."""
    docs.mkdir(parents=True, exist_ok=True)
    learning_figure(runs).savefig(docs / "learning.png", dpi=130)
    rows = [run.row for run in runs]
    (docs / "learning.json").write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    table = markdown_table(rows)
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    page = f"# Learning\n\n{INTRODUCTION}\n\n{table}\n![reward curves](learning.png)\n\nMeasured on: {about}.\n"
    (docs / "learning.md").write_text(page, encoding="utf-8")
    print(f"\n{table}")


def learning_figure(runs: Sequence[Run]) -> Figure:
    """Plot the reward of the trained batches: each seed pale, their mean bold, one colour per mode."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for mode, (colour, _) in MODES.items():
        curves = [running_mean([s.reward for s in run.steps], SMOOTHING_STEPS) for run in runs if run.mode == mode]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.9)
        shared = min(map(len, curves), default=0)
        mean = [sum(curve[i] for curve in curves) / len(curves) for i in range(shared)]
        label = f"{mode}, mean of {len(curves)} seeds" if len(curves) > 1 else mode
        axes.plot(range(1, shared + 1), mean, color=colour, linewidth=2.4, label=label)
    axes.set(
        xlabel="train step",
        ylabel=f"reward of the trained batch (mean of {SMOOTHING_STEPS} steps)",
        ylim=(0, 1),
        title="rollq demo: GRPO on two-digit sums and digit sorting",
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the runs as a Markdown table, one row per run."""
    lines = [
        "| run | seed | steps | held-out before | after | gain | tokens of staleness 1 | training, s | whole run, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['mode']} | {row['seed']} | {row['steps']} | {row['before']:.3f} | {row['after']:.3f} | "
            f"{row['gain']:+.3f} | {row['staleness_1_share']:.0%} | {row['train_s']:.0f} | {row['wall_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
