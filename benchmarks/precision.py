"""Does the demo learn with passes in bfloat16 as it does in float32? Trains it in one process and in two ranks.

python -m benchmarks.precision --seeds 1 2 3

All runs of a seed begin with the same model. Writes a section of `learning.md` and `learning-bfloat16.json` into
`--docs`; the folders of the runs are kept under `--runs`, and a run that has finished there is read, not repeated.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import orjson

from benchmarks.learning import PRECISION, with_part
from benchmarks.machine import describe
from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.demo.files import DemoFolder
from rollq.cli.demo.held_out import read_prompts
from rollq.cli.demo.mean_rewards import mean_rewards
from rollq.cli.settings.task_settings import EvaluationSettings
from rollq.cli.up.supervisor import Supervisor
from rollq.cli.up.watch import Watch
from rollq.monitor.report.records import read_steps

WAYS = {
    "float32, one process": ("", ()),
    "bfloat16, one process": ('dtype = "bfloat16"\n', ()),
    "bfloat16, two ranks": ('dtype = "bfloat16"\n', ("--ranks", "2")),
}
"""The compared ways to train: name -> settings of `[trainer]`, and options of `rollq train`."""
SAMPLES = 32
"""Held-out samples of each prompt."""
INTRODUCTION = f"""\
{PRECISION}

Each row is one asynchronous run of the demo's task, as at the top of this page, but with {{steps}} steps: with
`dtype = "float32"`, and with `dtype = "bfloat16"`, which rounds passes and published weights but not the optimizer. The
runs of a seed begin with the same model. Rewards are the means of both tasks, with {SAMPLES} samples of each held-out
prompt.

`python -m benchmarks.precision` writes this section and `learning-bfloat16.json`."""


def main() -> None:
    """Train in all ways with each seed, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for the page")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-precision-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for number, way in enumerate(WAYS):
            rows.append(run(way, seed, options.steps, (options.runs / f"{seed}-{number}").absolute()))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    write_section(rows, options.steps, options.docs)


def run(way: str, seed: int, steps: int, root: Path) -> dict[str, Any]:
    """Train once, unless `root` has a finished run; returns its row in the table."""
    folder = DemoFolder(root)
    if folder.summary.exists():
        row: dict[str, Any] = orjson.loads(folder.summary.read_bytes())
        return row
    made = root.with_name(f"{seed}-model")
    if not made.exists():
        command = [sys.executable, "-m", "rollq.cli.main", "demo", "--prepare"]
        subprocess.run([*command, "--seed", str(seed), "--steps", str(steps), "--out", str(made)], check=True)
    shutil.copytree(made, root)
    settings, arguments = WAYS[way]
    before = held_out(folder, folder.model, seed)
    with EmbeddedServer(folder.server) as server:
        text = folder.config.read_text("utf-8").replace("redis://127.0.0.1:6379/0", server.url)
        folder.config.write_text(text.replace("[trainer]\n", f"[trainer]\n{settings}"), "utf-8")
        started_s = time.monotonic()
        _run_roles(folder, server, steps, arguments)
        train_s = time.monotonic() - started_s
    after = held_out(folder, folder.trained_model, seed)
    found = read_steps(folder.metrics)
    row = {"way": way, "seed": seed, "steps": len(found), "before": before, "after": after, "train_s": train_s}
    folder.summary.write_bytes(orjson.dumps(row))
    return row


def _run_roles(folder: DemoFolder, server: EmbeddedServer, steps: int, arguments: Sequence[str]) -> None:
    command, config = (sys.executable, "-m", "rollq.cli.main"), str(folder.config)
    environment = {**os.environ, **folder.environment()}
    with Buffer.connect(server.url, "demo") as buffer, Supervisor(folder.logs, environment) as supervisor:
        supervisor.start("trainer", (*command, "train", config, *arguments), finishes=True)
        for role in ("produce", "work"):
            supervisor.start(role, (*command, role, config))
        watch = Watch(folder.root.name, folder.metrics, folder.depths, steps)
        watch.until_finished(buffer, server, supervisor, live=False)


def held_out(folder: DemoFolder, model: Path, seed: int) -> float:
    """Mean reward on the held-out prompts of both tasks."""
    evaluations = {
        task: EvaluationSettings(
            prompts=folder.prompts / f"{task}_heldout.jsonl",
            prompt_field="prompt",
            answer_field="answer",
            judge="exact_match",
            max_tokens=8,
        )
        for task in ("sum", "sort")
    }
    prompts = {task: (settings, read_prompts(settings)) for task, settings in evaluations.items()}
    return mean(mean_rewards(model, prompts, samples=SAMPLES, seed=seed).values())


def write_section(rows: Sequence[dict[str, Any]], steps: int, docs: Path) -> None:
    """Write the JSON file and the section of `learning.md` into `docs`."""
    (docs / "learning-bfloat16.json").write_bytes(
        orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    table = ["| run | seed | steps | held-out before | after | training, s |", "|---|---|---|---|---|---|"]
    table += [
        f"| {row['way']} | {row['seed']} | {row['steps']} | {row['before']:.3f} | {row['after']:.3f} | "
        f"{row['train_s']:.0f} |"
        for row in rows
    ]
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    parts = [INTRODUCTION.format(steps=steps), "\n".join(table), _compared(rows), f"Measured on: {about}."]
    page = docs / "learning.md"
    page.write_text(with_part(page.read_text("utf-8"), PRECISION, "\n\n".join(parts)), "utf-8")


def _compared(rows: Sequence[dict[str, Any]]) -> str:
    after = {way: [row["after"] for row in rows if row["way"] == way] for way in WAYS}
    pooled = mean(stdev(found) ** 2 for found in after.values()) ** 0.5
    means = "; ".join(f"{mean(found):.4f} for {way}" for way, found in after.items())
    return f"Means over the seeds: {means}. The pooled standard deviation of a run is {pooled:.4f}."


if __name__ == "__main__":
    main()
