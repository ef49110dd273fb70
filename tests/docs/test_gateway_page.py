"""docs/guide/gateway.md: its settings load, its agent runs, and its request gets a session."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.cli.settings.file import load_settings
from rollq.workers.gateway.harnesses.local import HarnessSettings
from rollq.workers.gateway.harnesses.remote import OutsideSettings
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.gateway.session_settings import SessionSettings
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, chat_tokenizer, rollout
from support.documented_commands import ROOT, blocks
from support.gateway_calls import run

PAGE = ROOT / "docs" / "guide" / "gateway.md"
FILES = {block.detail: block.code for block in blocks(PAGE) if block.mark == "file"}
REWARD = next(block.code for block in blocks(PAGE) if block.mark == "reward")
OUTSIDE = next(block.code for block in blocks(PAGE) if block.mark == "outside")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'run = "r"\n{code}' if name.endswith("toml") else code)
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sample_of(options: Mapping[str, object], model: Model, prompt: Prompt) -> Sample:
    """The sample of a harness with these options."""

    async def work() -> Sample:
        gateway = Gateway(GatewaySettings())
        changed = {"command": [sys.executable, "agent.py"], "tool_parser": ""}  # of a tokenizer without a family
        loop = make_loop("harness", {**options, **changed}, gateway)
        server = Server(gateway)
        await server.start()
        try:
            return await loop.run(rollout(model, prompt, max_tokens=2000))
        finally:
            await server.close()

    return run(work)


def test_the_agent_of_the_page_asks_twice(folder: Path, tokenizer: HfTokenizer) -> None:
    task = load_settings(folder / "rollq.toml", {}).tasks["sums"]
    model = Model(tokenizer, ["It is 41", "It is 42"])
    sample = sample_of(task.agent_options, model, Prompt("6*7?"))
    assert (sample.text, sample.extra["harness"]["exit_code"]) == ("It is 42", 0)
    assert sample.extra["harness"]["output"] == "It is 42"
    assert [message["content"] for message in sample.extra["messages"]] == [
        "6*7?", "It is 41", "Check that, and answer again.", "It is 42",
    ]  # fmt: skip
    assert len(sample.segments) == 1


def test_the_page_gives_a_reward(folder: Path, tokenizer: HfTokenizer) -> None:
    task = load_settings(folder / "rollq.toml", {}).tasks["sums"]
    agent = folder / "agent" / "agent.py"
    agent.write_text(f"{agent.read_text()}\nimport subprocess\nsubprocess.run({REWARD!r}, shell=True, check=True)\n")
    sample = sample_of({**task.agent_options, "program_rewards": True}, Model(tokenizer, ["a", "b"]), Prompt("6*7?"))
    assert (sample.reward, dict(sample.reward_parts)) == (1.0, {"tests": 1.0})


def test_the_request_of_the_page_gets_a_session(
    folder: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")
    settings = load_settings(folder / "outside.toml", {})
    task = settings.tasks["sums"]
    assert settings.worker.gateway.bind == "0.0.0.0:8100"

    async def work() -> None:
        gateway = Gateway(GatewaySettings())
        server = Server(gateway)
        await server.start()
        loop = make_loop("outside", {**task.agent_options, "tool_parser": ""}, gateway)
        made = replace(rollout(Model(tokenizer, ["Hello"]), Prompt("Say hello")), task="sums")
        making = asyncio.ensure_future(loop.run(made))
        command = OUTSIDE.replace("http://127.0.0.1:8100", gateway.url)
        answer = b""
        while b'"prompt"' not in answer:
            asking = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
            answer, _ = await asking.communicate()
        assert b'"prompt":"Say hello"' in answer
        making.cancel()
        await server.close()

    run(work)


def test_the_page_names_every_setting() -> None:
    text = PAGE.read_text("utf-8")
    settings = (HarnessSettings, OutsideSettings, SessionSettings, GatewaySettings)
    missing = [name for model in settings for name in model.model_fields if f"{name} = " not in text]
    assert missing == []
