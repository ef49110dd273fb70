"""How many tokens does a run generate until it has learned, if groups are trained several times?

python -m benchmarks.replay --seeds 1 2 3

Trains the model of `rollq init` on its prompts with `rollq up`, with each group trained once, and up to four times.
Writes a section of `learning.md` and `replay.json` into `--docs`; the folders of the runs are kept under `--runs`, and
a run that has finished there is read, not repeated.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks.learning import REPLAY, with_part
from benchmarks.machine import describe

STEPS: Final = {1: 60, 4: 110}
"""`max_uses` -> train steps, enough to reach `GOAL`."""
GOAL: Final = 0.9
GROUP_SIZE, MAX_TOKENS = 8, 8
INTRODUCTION = """\
Each row is one run of `rollq up` on the files of `rollq init`: batches of 8 groups of 8 samples, one worker, learning
rate 1e-3. A quarter of the prompts is held out and evaluated every 5 steps, 4 samples of each at temperature 1.
`max_uses = 4` goes with `max_staleness = 8` and `order = "uniform"`, `max_uses = 1` with the defaults. Steps and tokens
are those at which the held-out reward reaches 0.9, interpolated between evaluations.

`python -m benchmarks.replay` writes this section and `replay.json`.
"""
CONCLUSION = """
With four uses, a run generates a third of the groups in each step, but needs four to five times the steps, and so more
tokens in total. This policy learns its task within 25 steps, so samples that are a few steps old say little about it. A
policy that changes slowly may gain. Measure before you turn it on.
"""
REUSE = """max_staleness = 8

[tasks.digits.batches]
max_uses = 4
order = "uniform"

"""
HELD_OUT = """
[evaluations.held_out]
prompts = "held_out.jsonl"
judge = "rewards.digits"
group_size = 4
max_tokens = 8
temperature = 1.0
"""


def main() -> None:
    """Run both settings with each seed, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--port", type=int, default=7551, help="of the runs' server")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for the page")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-replay-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for uses in STEPS:
            rows.append(run(uses, seed, options.port, (options.runs / f"uses-{uses}-{seed}").absolute()))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    write_section(rows, options.docs)


def run(uses: int, seed: int, port: int, folder: Path) -> dict[str, Any]:
    """Train once, unless the folder has the run; returns its row."""
    output = folder / "trainer"
    if not (output / "evaluations.jsonl").exists():
        rollq = [sys.executable, "-m", "rollq.cli.main"]
        subprocess.run([*rollq, "init", folder], check=True)
        write_files(folder, uses, seed, port)
        subprocess.run([*rollq, "up", "rollq.toml"], cwd=folder, check=True)
    steps = _lines(output / "metrics.jsonl")
    step, tokens = reached(_lines(output / "evaluations.jsonl"), _tokens_by_step(steps))
    return {
        "max_uses": uses,
        "seed": seed,
        "steps": round(step),
        "tokens": round(tokens),
        "groups generated a step": round(sum(map(_groups, steps)) / len(steps), 1),
        "staleness": round(sum(step["staleness"] for step in steps) / len(steps), 1),
    }


def write_files(folder: Path, uses: int, seed: int, port: int) -> None:
    """Divide the prompts, and write the settings of a run."""
    prompts = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "held_out.jsonl").write_text("".join(prompts[3::4]))
    (folder / "prompts.jsonl").write_text("".join(line for index, line in enumerate(prompts) if index % 4 != 3))
    settings = (folder / "rollq.toml").read_text()
    for old, new in {
        'redis://127.0.0.1:6379/0"': f'redis://127.0.0.1:{port}/0"',
        "\n[redis]": f"seed = {seed}\n\n[redis]",
        "\nsteps = 40": f"\nsteps = {STEPS[uses]}\nevaluate_every = 5",
        "[worker.options]": (REUSE if uses > 1 else "") + "[worker.options]",
    }.items():
        assert old in settings, old
        settings = settings.replace(old, new, 1)
    (folder / "rollq.toml").write_text(settings + HELD_OUT)


def reached(evaluations: Iterable[Mapping[str, Any]], tokens: Mapping[int, int]) -> tuple[float, float]:
    """The step and the number of generated tokens at which the held-out reward reaches `GOAL`. Raises `ValueError`."""
    before = (0.0, 0.0, 0.0)
    for evaluation in evaluations:
        reward = next(value for name, value in evaluation.items() if name.endswith("/reward"))
        now = (evaluation["step"], tokens.get(evaluation["step"], 0), reward)
        if reward >= GOAL:
            part = (GOAL - before[2]) / (reward - before[2])
            return before[0] + part * (now[0] - before[0]), before[1] + part * (now[1] - before[1])
        before = now
    raise ValueError(f"the run never reached a held-out reward of {GOAL}")


def write_section(rows: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write the section of the page, and the rows as JSON."""
    (docs / "replay.json").write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    table = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    table += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    parts = [REPLAY, INTRODUCTION, "\n".join(table), CONCLUSION, f"Measured on: {about}."]
    page = docs / "learning.md"
    page.write_text(with_part(page.read_text("utf-8"), REPLAY, "\n\n".join(part.strip() for part in parts)), "utf-8")


def _tokens_by_step(steps: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    steps = list(steps)
    tokens = accumulate(_groups(step) * GROUP_SIZE * MAX_TOKENS for step in steps)
    return {step["step"]: total for step, total in zip(steps, tokens, strict=True)}


def _groups(step: Mapping[str, Any]) -> int:
    """Groups that were completed since the previous step."""
    return int(step["produced"]["digits"]["groups"].get("completed", 0))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


if __name__ == "__main__":
    main()
