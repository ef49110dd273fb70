"""docs/guide/agent-clients.md: each program runs as a harness, and its calls become segments.

The SDKs are installed with rollq's tests. The other clients are installed from the package index into an environment of
their own, on first use, by the slow tests; so are Claude Code and Codex, from npm.
"""

import sys
from pathlib import Path

import pytest

from rollq.buffer.rollouts import Prompt, Sample
from rollq.workers.agent_loops import make_loop
from rollq.workers.gateway.gateway import Gateway
from rollq.workers.gateway.server import Server
from rollq.workers.gateway.settings import GatewaySettings
from support.agent_programs import CLIENTS as INSTALLED
from support.agent_programs import programs, python_with
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.documented_commands import ROOT, blocks
from support.gateway_calls import run, trained_tokens

PAGE = ROOT / "docs" / "guide" / "agent-clients.md"
CLIENTS = {block.detail: block.code for block in blocks(PAGE) if block.mark == "client"}
WITH_A_TOOL = [call("calculator", expression="6*7"), "It is 42"]


def sample_of(words: list[str], folder: Path, *command: str) -> Sample:
    """The sample of a program that talks to a model with these words."""

    async def work() -> Sample:
        gateway = Gateway(GatewaySettings())
        loop = make_loop("harness", {"command": command, "workspace": folder, "tool_parser": "hermes"}, gateway)
        server = Server(gateway)
        await server.start()
        try:
            given = rollout(model, Prompt("6*7?"), max_tokens=400_000, max_prompt_tokens=400_000)
            return await loop.run(given)
        finally:
            await server.close()

    model = Model(chat_tokenizer(folder.parent / "tokenizer"), words)
    return run(work)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_sdk_asks_once(client: str, workspace: Path) -> None:
    (workspace / "agent.py").write_text(CLIENTS[client])
    sample = sample_of(["It is 42"], workspace, sys.executable, "agent.py")
    assert sample.extra["harness"]["output"] == "It is 42"
    assert (sample.text, len(sample.segments)) == ("It is 42", 1)


@pytest.mark.slow
@pytest.mark.parametrize("client", INSTALLED)
def test_an_agent_uses_its_tool(client: str, workspace: Path) -> None:
    (workspace / "agent.py").write_text(CLIENTS[client])
    words = WITH_A_TOOL if client != "smolagents" else [WITH_A_TOOL[0], call("final_answer", answer="It is 42")]
    sample = sample_of(words, workspace, python_with(client), "agent.py")
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert sample.extra["harness"]["output"].endswith("It is 42")
    assert len(sample.segments) == (2 if client == "smolagents" else 1)
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


@pytest.mark.slow
def test_codex_reads_its_settings(workspace: Path) -> None:
    script = CLIENTS["codex"].replace("exec codex", f"exec {programs() / 'codex'}")
    (workspace / "codex.sh").write_text(script)
    sample = sample_of(["It is 42"], workspace, "sh", "codex.sh")
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert (sample.text, len(sample.segments)) == ("It is 42", 1)
