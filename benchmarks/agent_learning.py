"""Does an agent learn over the gateway as it does in rollq's loop `tools`? Trains both on sums, with a calculator.

python -m benchmarks.agent_learning --seeds 1 2 3 --python PYTHON_WITH_LANGGRAPH

The agent of LangGraph is a separate process (benchmarks/langgraph_agents.py), which takes the sessions of a worker with
`agent_loop = "outside"`. Everything else is the same for both: the prompts, the trainer, and the model, which knows how
to call the calculator but rarely does so correctly. Writes the last section of `learning.md` and `agent-learning.json`
into `--docs`; the folders of the runs are kept under `--runs`, and a run that has finished there is read, not repeated.
"""

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken

from benchmarks.learning import AGENTS, with_part
from benchmarks.machine import describe
from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.demo import tiny_model as tiny
from rollq.cli.demo.files import DemoFolder
from rollq.cli.demo.held_out import read_prompts
from rollq.cli.demo.mean_rewards import mean_rewards
from rollq.cli.demo.prompts import prompt_files
from rollq.cli.settings.task_settings import EvaluationSettings
from rollq.cli.up.supervisor import Supervisor
from rollq.cli.up.watch import Watch
from rollq.monitor.report.records import read_steps

LOOPS = {"tools": "the loop `tools`", "outside": "LangGraph over the gateway"}
CALL, CALL_END = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
TURN, ANSWER_TURN = "user: ", "<eos>\nassistant: "
TOOL_TURN = "<eos>\ntool: "
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WARM_UP_STEPS = 400
CALLS, RIGHT_CALLS, RIGHT_COPIES = 0.5, 0.5, 0.6
"""The rates in the warm-up at which an answer is a call, a call is right, and a result is copied correctly. Direct
answers are right as often as calls."""
INTRODUCTION = """\
Each row is one run of GRPO on the demo's sums of two numbers, 8 groups of 8 samples per step, with
the demo's tiny model. The model has seen calculator calls and direct answers, most of them wrong. It has to learn to
call the calculator, to pass the right numbers, and to repeat the result. An agent is either rollq's loop `tools`, or
LangGraph's `create_agent` in another process, which takes sessions of the gateway (`agent_loop = "outside"`) and runs
the calculator itself. Rewards are from 256 held-out prompts, 8 samples of each, at temperature 1, all in the loop
`tools`, whichever agent the model was trained with. Chance alone moves their mean by about 0.004.

`python -m benchmarks.agent_learning --python PYTHON_WITH_LANGGRAPH` writes this section and `agent-learning.json`."""
SAMPLES = 8
"""The number of samples of each held-out prompt."""

SETTINGS = """\
run = "agents"
seed = {seed}

[redis]
buffer_url = "{url}"

[tasks.sums]
prompts = "prompts/sum.jsonl"
judge = "last_number"
rows.chat = true
agent_loop = "{loop}"
rows.max_prompt_tokens = 64
max_tokens = 64
batch_groups = {batch_groups}
group_size = 8
max_staleness = 1

[tasks.sums.agent_options]
{options}
[worker]
grace_s = 1.0
samples_in_flight = {samples}

[worker.options]
model = "model"

[worker.gateway]
bind = "127.0.0.1:{port}"

[trainer]
model = "model"
output = "trainer"
steps = {steps}
learning_rate = 5e-4
transport = "redis"
checkpoint_every = 10
layout = "padded"
threads = 1
"""
OPTIONS = {
    "tools": "tools = { calculator = {} }\n",
    "outside": 'tool_parser = "hermes"\nidle_s = 60\n',
}


def main() -> None:
    """Run both loops with each seed, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-groups", type=int, default=8)
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--python", default=sys.executable, help="a Python with langchain and langchain-openai")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for the page")
    parser.add_argument("--runs", type=Path, default=Path(f"rollq-agents-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for loop in options.loops:
            rows.append(run(options, loop, seed, (options.runs / f"{loop}-{seed}").absolute()))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    write_page(rows, options.docs)


def run(options: argparse.Namespace, loop: str, seed: int, root: Path) -> dict[str, Any]:
    """Train once, unless `root` has a finished run; returns its row in the table."""
    folder = DemoFolder(root)
    if folder.summary.exists():
        row: dict[str, Any] = orjson.loads(folder.summary.read_bytes())
        return row
    folder.create()
    os.environ.update(folder.environment())
    tempfile.tempdir = None
    for name, content in prompt_files().items():
        (folder.prompts / name).write_bytes(content)
    make_model(folder, seed)
    before = held_out(folder, folder.model, seed)
    port = free_port("127.0.0.1")
    with EmbeddedServer(folder.server) as server:
        facts = {"seed": seed, "url": server.url, "loop": loop, "options": OPTIONS[loop], "port": port}
        sizes = {"steps": options.steps, "batch_groups": options.batch_groups, "samples": 8 * options.batch_groups}
        folder.config.write_text(SETTINGS.format(**facts, **sizes), "utf-8")
        started_s = time.monotonic()
        _run_roles(options, folder, server, loop, f"http://127.0.0.1:{port}")
        train_s = time.monotonic() - started_s
    after = held_out(folder, folder.trained_model, seed)
    steps = read_steps(folder.metrics)
    row = {"loop": loop, "seed": seed, "steps": len(steps), "before": before, "after": after, "train_s": train_s}
    folder.summary.write_bytes(orjson.dumps(row))
    return row


def _run_roles(
    options: argparse.Namespace, folder: DemoFolder, server: EmbeddedServer, loop: str, gateway: str
) -> None:
    environment = {**os.environ, "ROLLQ_GATEWAY_KEY": secrets.token_urlsafe(32)}
    command = (sys.executable, "-m", "rollq.cli.main")
    with Buffer.connect(server.url, "agents") as buffer, Supervisor(folder.logs, environment) as supervisor:
        supervisor.start("trainer", (*command, "train", str(folder.config)), finishes=True)
        for role in ("produce", "work"):
            supervisor.start(role, (*command, role, str(folder.config)))
        if loop == "outside":
            agents = Path(__file__).with_name("langgraph_agents.py")
            supervisor.start("agents", (options.python, str(agents), gateway))
        watch = Watch(folder.root.name, folder.metrics, folder.depths, options.steps)
        watch.until_finished(buffer, server, supervisor, live=False)


def held_out(folder: DemoFolder, model: Path, seed: int) -> float:
    """Mean reward on the held-out prompts, always in the loop `tools`, even for models trained in another."""
    settings = EvaluationSettings(
        prompts=folder.prompts / "sum_heldout.jsonl",
        judge="last_number",
        chat=True,
        agent_loop="tools",
        agent_options={"tools": {"calculator": {}}},
        max_prompt_tokens=64,
        max_tokens=64,
    )
    return mean_rewards(model, {"sums": (settings, read_prompts(settings))}, samples=SAMPLES, seed=seed)["sums"]


def make_model(folder: DemoFolder, seed: int) -> None:
    """A tiny model that has seen calls of the calculator, half of them right, and direct answers."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CALL_END)])
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny.make_model(len(tokenizer), seed)
    questions = tiny.read_questions(folder.prompts / "sum.jsonl")
    tiny.warm_up(model, tokenizer, questions, seed=seed, steps=WARM_UP_STEPS, progress=False, lesson=_lesson)
    tiny.save(folder.model, model, tokenizer)


def _lesson(question: tiny.Question, rng: random.Random) -> tiny.Question:
    """The model's words after a question, or to the result of its call."""
    opening = f"{TURN}{question.prompt}{ANSWER_TURN}"
    expression, answer = question.prompt.removesuffix("="), question.answer
    if rng.random() < 0.5:  # the turn after a call
        said = answer if rng.random() < RIGHT_COPIES else tiny.wrong_answer(answer, rng)
        return tiny.Question(f"{opening}{CALL}{expression}{CALL_END}{TOOL_TURN}{answer}{ANSWER_TURN}", said)
    if rng.random() < CALLS:
        left, right = expression.split("+")
        wrong = f"{left[::-1]}+{right[::-1]}"
        return tiny.Question(opening, f"{CALL}{expression if rng.random() < RIGHT_CALLS else wrong}{CALL_END}")
    return tiny.Question(opening, answer if rng.random() < RIGHT_CALLS else tiny.wrong_answer(answer, rng))


def write_page(rows: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write the table and the JSON file."""
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "agent-learning.json").write_bytes(
        orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    lines = ["| agent | seed | steps | held-out before | after | training, s |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {LOOPS[row['loop']]} | {row['seed']} | {row['steps']} | {row['before']:.3f} | {row['after']:.3f} | "
            f"{row['train_s']:.0f} |"
        )
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    table = "\n".join(lines)
    part = "\n\n".join([f"{AGENTS}\n\n{INTRODUCTION}", table, f"Measured on: {about}."])
    page = docs / "learning.md"
    page.write_text(with_part(page.read_text("utf-8") if page.exists() else "", AGENTS, part), "utf-8")
    print(f"\n{table}")


if __name__ == "__main__":
    main()
