"""Agents over the gateway, real workers, real swaps: every trained token has the logprob of the weights that it claims.

The agent asks twice in one conversation and once in another, so that weights change within calls and between them.
"""

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.chat_engine import PLAIN
from support.forked_roles import recorded_trainer, role
from support.recorded_run import recompute_all
from support.waiting import PATIENCE_S

STEPS = 3
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
AGENT = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": "rollq", "messages": messages, "max_tokens": 40}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

question = {"role": "user", "content": sys.stdin.read()}
first = ask([question])
ask([question, {"role": "assistant", "content": first}, {"role": "user", "content": "2"}])
ask([question, {"role": "assistant", "content": first}, {"role": "user", "content": "3"}])
"""
OPTIONS = """
[tasks.{task}.agent_options]
command = [{python}, {agent}]
concurrent = 8
tool_parser = ""
"""


@pytest.fixture
def prepared(prepared_demo: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A demo's folder with a model that knows nothing, an agent, and a judge that rewards what can be learnt."""
    folder = shutil.copytree(prepared_demo, tmp_path / "demo")
    swap, partial = request.param
    edits = {
        "batch_groups = 16": "batch_groups = 2",
        "group_size = 8": "group_size = 4",
        "max_tokens = 8": "max_tokens = 120",
        'judge = "exact_match"': 'judge = "parity_judge.reward"\nrows.max_prompt_tokens = 64\n'
        'staleness.stragglers = "expire"\n'
        'agent_loop = "harness"',
        "temperature = 1.0": "temperature = 0.7",
        "partial_rollout = false": f"partial_rollout = {partial}",
        'swap = "keep"': f'swap = "{swap}"',
        "[worker.options]": "[worker.options]\nmax_batch = 8",
        "steps = 150": f"steps = {STEPS}",
        "learning_rate = 0.0005": "learning_rate = 0.002",
    }
    config = folder / "rollq.toml"
    text = config.read_text("utf-8")
    for old, new in edits.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    agent = folder / "agent.py"
    for task in ("sum", "sort"):
        text += OPTIONS.format(task=task, python=orjson.dumps(sys.executable).decode(), agent=f'"{agent}"')
    config.write_text(text, "utf-8")
    agent.write_text(AGENT)
    (folder / "parity_judge.py").write_text(JUDGE, "utf-8")
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "prepared",
    [("abort", "true"), *(pytest.param(way, marks=pytest.mark.slow) for way in (("keep", "true"), ("wait", "true")))],
    indirect=True,
    ids=["abort", "keep", "wait"],
)
def test_every_token_of_an_agents_calls_has_the_logprob_of_the_weights_that_it_claims(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        roles.enter_context(role(prepared, "produce", "rollq.toml"))
        for name in ("one", "two"):
            roles.enter_context(role(prepared, "work", "rollq.toml", "--name", name))
        trainer = roles.enter_context(recorded_trainer(prepared))
        logs = [prepared / "train-rollq.toml.log"]
        trainer.join(PATIENCE_S)
        assert trainer.exitcode == 0, "\n".join(log.read_text() for log in logs)

    assert len(list((prepared / "record" / "batches").iterdir())) == STEPS
    seen = recompute_all(prepared / "record", tolerance=1e-4)
    assert seen.ages == {0, 1}
