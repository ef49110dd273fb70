"""Does a pretrained model learn a task of reasoning-gym? Trains SmolLM2-135M on `env = "reasoning-gym:chain_sum"`.

python -m benchmarks.environment_learning --seeds 1 2 3 --verifiers .venv-environments/bin/python

Rows come from `env`, written as plain text with one solved row before each question; both orders of a sum are in the
same part. A control trains on shuffled rewards. Writes a section of `learning.md` and `environment-learning.json` into
`--docs`; the folders of the runs are kept under `--runs`, and a run that has finished there is read, not repeated.
`--verifiers` trains once more on the same rows as chat, by `env` and by a task set of verifiers, with the first seed.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks.learning import ENVIRONMENTS, with_part
from benchmarks.machine import describe
from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.demo.files import DemoFolder
from rollq.cli.demo.held_out import held_out_rewards
from rollq.cli.demo.smollm2 import make_smollm2
from rollq.cli.settings.file import load_settings
from rollq.cli.up.supervisor import Supervisor
from rollq.cli.up.watch import Watch
from rollq.environments.expansion import Environment
from rollq.environments.rows import made_rows
from rollq.monitor.report.records import read_steps

MODES: Final = {"env": "rollq.cli.main", "rewards shuffled (control)": "benchmarks.control"}
OPTIONS: Final = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
BRIDGES: Final = ("reasoning-gym", "verifiers")
BRIDGE_STEPS: Final = 8
TASK_SETS: Final = Path(__file__).parent / "task_sets"
ROWS: Final = 200
HELD_OUT: Final = 50
INTRODUCTION = """\
Each row is one run of GRPO on `env = "reasoning-gym:chain_sum"` with two terms of one digit: SmolLM2-135M-Instruct, all
weights trained in float32, 4 groups of 8 samples per step, learning rate 5e-6. A prompt is plain text: one solved row,
"Question: ...\\nAnswer: 5", then the question. Of 200 different rows, 50 are held out, with both orders of a sum in the
same part. Rewards are measured on held-out rows, with 4 samples of each at temperature 1, as in training. Chance alone
moves their mean by about 0.03. The control shuffles the rewards within each batch. Other work shared the machine, so
times are upper limits.

`python -m benchmarks.environment_learning --verifiers PYTHON_WITH_VERIFIERS` writes this section and
`environment-learning.json`."""

SHOWN = """\
The next table compares training rewards on the same rows, as chat and without a solved row, from two sources: the
environment in one line, and a verifiers task set, whose runner owns the loop. Rows and their order are the same.

| rows by | mean reward of each step | mean |
|---|---|---|
"""
BRIDGE = {
    "reasoning-gym": """\
env = "reasoning-gym:chain_sum"
env_options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
prompts = "prompts/chat.jsonl"
""",
    "verifiers": """\
env = "verifiers:rows_with_numbers"
agent_options.tool_parser = ""

[tasks.sums.env_options]
python = "PYTHON"
config = { taskset = { path = "PATH" } }
runners = 1
""",
}
SETTINGS = """\
run = "chain-sum"
seed = {seed}

[redis]
buffer_url = "{url}"

[tasks.sums]
env = "reasoning-gym:chain_sum"
env_options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
prompts = "prompts/train.jsonl"
batch_groups = 4
group_size = 8
max_tokens = 8
sampling.stop = ["\\n"]
temperature = {temperature}

[evaluations.held_out]
env = "reasoning-gym:chain_sum"
env_options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
prompts = "prompts/held_out.jsonl"
max_tokens = 8
sampling.stop = ["\\n"]
temperature = {temperature}

[worker]
grace_s = 1.0
swap = "keep"

[worker.options]
model = "model"

[trainer]
model = "model"
output = "trainer"
steps = {steps}
learning_rate = {learning_rate}
transport = "path"
checkpoint_every = 5
layout = "padded"
threads = 1
"""


def main() -> None:
    """Run both modes with each seed, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--verifiers", help="Python with verifiers, for the comparison with it")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for the page")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-environments-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for mode in options.modes:
            rows.append(run(options, mode, seed, (options.runs / f"{mode.split()[0]}-{seed}").absolute()))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    ways = []
    for bridge in BRIDGES if options.verifiers else ():
        ways.append(run_by(options, bridge, (options.runs / f"chat-{bridge}").absolute()))
        print(orjson.dumps(ways[-1]).decode(), flush=True)
    write_page(rows, ways, options.docs)


def run_by(options: argparse.Namespace, bridge: str, root: Path) -> dict[str, Any]:
    """Train once on chat rows from a bridge; returns its rewards."""

    def train(folder: DemoFolder) -> dict[str, Any]:
        os.environ["PYTHONPATH"] = os.pathsep.join((str(TASK_SETS), *sys.path))
        seed, chat = options.seeds[0], folder.prompts / "chat.jsonl"
        rows = [{**row, "prompt": as_chat(row["question"])} for row in split_rows(seed)["train"]]
        chat.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        with EmbeddedServer(folder.server) as server:
            facts = {name: getattr(options, name) for name in ("temperature", "learning_rate")}
            tables = SETTINGS.format(seed=seed, url=server.url, steps=BRIDGE_STEPS, **facts).split("\n\n")
            kept = ("[", "batch", "group", "max_t", "temp")
            lines = [line for line in tables[2].splitlines() if line.startswith(kept)]
            way = BRIDGE[bridge].replace("PYTHON", str(Path(options.verifiers).absolute())).replace("PATH", str(chat))
            tables[2] = "\n".join(lines) + "\n" + way
            del tables[3]  # the evaluation
            folder.config.write_text("\n\n".join(tables), "utf-8")
            _run_roles(BRIDGE_STEPS, folder, server, MODES["env"])
        return {"way": bridge, "rewards": [step.reward for step in read_steps(folder.metrics)]}

    return once(root, train)


def as_chat(question: str) -> list[dict[str, str]]:
    """A question as messages."""
    return [{"role": "user", "content": f"{question}\nAnswer with the number alone."}]


def run(options: argparse.Namespace, mode: str, seed: int, root: Path) -> dict[str, Any]:
    """Train once; returns its row in the table."""

    def train(folder: DemoFolder) -> dict[str, Any]:
        for name, part in split_rows(seed).items():
            (folder.prompts / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in part))
        with EmbeddedServer(folder.server) as server:
            facts = {name: getattr(options, name) for name in ("steps", "temperature", "learning_rate")}
            folder.config.write_text(SETTINGS.format(seed=seed, url=server.url, **facts), "utf-8")
            evaluations = load_settings(folder.config).evaluations
            before = held_out_rewards(folder.model, evaluations, seed)["held_out"]
            started_s = time.monotonic()
            _run_roles(options.steps, folder, server, MODES[mode])
            train_s = time.monotonic() - started_s
            after = held_out_rewards(folder.trained_model, evaluations, seed)["held_out"]
        steps = len(read_steps(folder.metrics))
        return {"mode": mode, "seed": seed, "steps": steps, "before": before, "after": after, "train_s": train_s}

    return once(root, train)


def once(root: Path, train: Callable[[DemoFolder], dict[str, Any]]) -> dict[str, Any]:
    """The findings of a run in `root`, which are read if it has finished before."""
    folder = DemoFolder(root)
    if folder.summary.exists():
        found: dict[str, Any] = orjson.loads(folder.summary.read_bytes())
        return found
    folder.create()
    os.environ.update(folder.environment())
    make_smollm2(folder.model, print)
    found = train(folder)
    folder.summary.write_bytes(orjson.dumps(found))
    return found


def split_rows(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The rows to train on and the held-out rows, each after a solved row that is in neither part."""
    environment = Environment("reasoning-gym:chain_sum", {**OPTIONS, "seed": seed}, "train", ROWS)
    unique = {row["prompt"]: row for row in islice(made_rows(environment), 10 * ROWS)}
    solved, *others = list(unique.values())[:ROWS]
    sums: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in others:
        sums.setdefault(terms_of(row["prompt"]), []).append(row)
    keys = sorted(sums.keys() - {terms_of(solved["prompt"])})
    random.Random(seed).shuffle(keys)
    parts: dict[str, list[dict[str, Any]]] = {"held_out": [], "train": []}
    for key in keys:
        parts["held_out" if len(parts["held_out"]) < HELD_OUT else "train"] += sums[key]
    return {name: [_shown(row, solved) for row in part] for name, part in parts.items()}


def terms_of(question: str) -> tuple[str, ...]:
    """The operator and both terms of a question, in order of size if they may be exchanged."""
    first, sign, second = question.removesuffix(" =").split()[-3:]
    return (sign, *(sorted((first, second)) if sign == "+" else (first, second)))


def _shown(row: dict[str, Any], solved: dict[str, Any]) -> dict[str, Any]:
    shown = f"Question: {solved['prompt']}\nAnswer: {solved['answer']}\n\nQuestion: {row['prompt']}\nAnswer:"
    return {**row, "prompt": shown, "question": row["prompt"]}


def _run_roles(steps: int, folder: DemoFolder, server: EmbeddedServer, trainer: str) -> None:
    with Buffer.connect(server.url, "chain-sum") as buffer, Supervisor(folder.logs, dict(os.environ)) as supervisor:
        supervisor.start("trainer", (sys.executable, "-m", trainer, "train", str(folder.config)), finishes=True)
        for role in ("produce", "work"):
            supervisor.start(role, (sys.executable, "-m", "rollq.cli.main", role, str(folder.config)))
        watch = Watch(folder.root.name, folder.metrics, folder.depths, steps)
        watch.until_finished(buffer, server, supervisor, live=False)


def write_page(rows: Sequence[dict[str, Any]], ways: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write the table and the JSON file."""
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "environment-learning.json").write_bytes(
        orjson.dumps({"runs": rows, "ways": ways}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    lines = [
        "| rewards | seed | steps | held-out before | after | gain | training, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['mode']} | {row['seed']} | {row['steps']} | {row['before']:.3f} | {row['after']:.3f} | "
            f"{row['after'] - row['before']:+.3f} | {row['train_s']:.0f} |"
        )
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    parts = [f"{ENVIRONMENTS}\n\n{INTRODUCTION}", "\n".join(lines), f"Measured on: {about}."]
    if ways:
        parts.insert(2, SHOWN + "\n".join(map(_line, ways)))
    part = "\n\n".join(parts)
    page = docs / "learning.md"
    page.write_text(with_part(page.read_text("utf-8") if page.exists() else "", ENVIRONMENTS, part), "utf-8")


def _line(way: dict[str, Any]) -> str:
    rewards = way["rewards"]
    shown = ", ".join(f"{reward:.2f}" for reward in rewards)
    return f"| {way['way']} | {shown} | {sum(rewards) / len(rewards):.3f} |"


if __name__ == "__main__":
    main()
