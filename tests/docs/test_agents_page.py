"""docs/guide/agents.md: its settings load, and its tool, environment and loop do what it says."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.cli.settings.file import load_settings
from rollq.workers.agents.multi_turn import EnvironmentSettings
from rollq.workers.agents.tool_environment import ToolsSettings
from rollq.workers.agents.tools import ToolSettings
from rollq.workers.groups.agent_loops import BUILT_IN, make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, call, chat_tokenizer, converse
from support.documented_commands import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "agents.md"
FILES = {block.detail: block.code for block in blocks(PAGE) if block.mark == "file"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, where Python finds them."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(f'run = "r"\n{code}' if name.endswith("toml") else code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "agents")
    yield tmp_path
    for module in ("shop", "games", "loops"):
        sys.modules.pop(module, None)


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sample_of(path: Path, task: str, model: Model, prompt: Prompt) -> Sample:
    settings = load_settings(path, {}).tasks[task]
    return converse(make_loop(settings.agent_loop, settings.agent_options), model, prompt, max_tokens=2000)


def test_the_tools_of_the_page_answer(folder: Path, tokenizer: HfTokenizer) -> None:
    words = [
        call("stock", item="pears") + call("lookup", key="speed of light") + call("calculator", expression="2**5"),
        call("stock", item="plums"),
        "3",
    ]
    prompt = Prompt("How many pears?", metadata={"shelf": {"pears": 3}})
    sample = sample_of(folder / "rollq.toml", "math", Model(tokenizer, words), prompt)
    answers = [message["content"] for message in sample.extra["messages"] if message["role"] == "tool"]
    assert answers == ['{"left":3}', "299792458 m/s", "32", "error: we do not sell plums"]
    stock = next(tool["function"] for tool in sample.tools if tool["function"]["name"] == "stock")
    assert stock["description"] == "How many of an item are left."
    assert stock["parameters"]["properties"] == {"item": {"type": "string", "description": "what is sold"}}


def test_the_environment_of_the_page_plays(folder: Path, tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, ["9", "3", "7"])
    sample = sample_of(folder / "environment.toml", "guess", model, Prompt("Let us play.", answer="7"))
    assert sample.status is SampleStatus.COMPLETED
    assert sample.extra["environment_reward"] == pytest.approx(0.8)
    assert [each["content"] for each in sample.extra["messages"]] == ["9", "lower", "3", "higher", "7"]


def test_the_loop_of_the_page_asks_twice(folder: Path, tokenizer: HfTokenizer) -> None:
    loop = make_loop("loops.Revise", {"words": "Sure?"})
    sample = converse(loop, Model(tokenizer, ["41", "42"]))
    [segment] = sample.segments
    assert tokenizer.decode(segment.response_ids.tolist()) == "41\nuser: Sure?\nassistant: 42"
    assert segment.loss_mask is not None
    assert (sample.status, sample.finish_reason, sample.text) == (SampleStatus.COMPLETED, FinishReason.STOP, "42")


def test_the_loop_of_the_page_ends_where_no_room_is_left(folder: Path, tokenizer: HfTokenizer) -> None:
    loop = make_loop("loops.Revise", {"words": "?" * 5000})
    sample = converse(loop, Model(tokenizer, ["41"]))
    assert (sample.status, sample.finish_reason, sample.text) == (SampleStatus.COMPLETED, FinishReason.LENGTH, "41")


def test_every_loop_and_every_option_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    assert [name for name in BUILT_IN if f'`"{name}"`' not in text] == []
    files = ("rollq.toml", "environment.toml", "mcp.toml")
    shown: dict[str, Any] = {name: tomllib.loads(FILES[name])["tasks"] for name in files}
    options = shown["rollq.toml"]["math"]["agent_options"]
    assert set(options) == set(ToolsSettings.model_fields)
    servers = shown["mcp.toml"]["search"]["agent_options"]["tools"]
    tools = {key for tables in (options["tools"], servers) for tool in tables.values() for key in tool}
    assert tools == set(ToolSettings.model_fields)
    assert set(shown["environment.toml"]["guess"]["agent_options"]) == set(EnvironmentSettings.model_fields)


def test_the_servers_of_the_page_are_settings(folder: Path) -> None:
    task = load_settings(folder / "mcp.toml", {}).tasks["search"]
    tools = ToolsSettings.model_validate(task.agent_options).tools
    assert tools["desk"].mcp_command == ["python3", "desk.py"]
    assert tools["desk"].is_shared
    assert not tools["web"].is_shared


def test_the_defaults_on_the_page_are_the_real_ones() -> None:
    tools = tomllib.loads(FILES["rollq.toml"])["tasks"]["math"]["agent_options"]
    settings = ToolsSettings(tools={"calculator": {}})  # type: ignore[dict-item]
    assert {name: getattr(settings, name) for name in tools if name != "tools"} == {
        name: value for name, value in tools.items() if name != "tools"
    }
    assert "a call may take (30)" in FILES["rollq.toml"]
    assert "calls in one sample (16)" in FILES["rollq.toml"]
    assert "in one worker (64)" in FILES["rollq.toml"]
    tool = ToolSettings()
    assert (tool.timeout_s, tool.max_calls, tool.concurrent, tool.start_timeout_s) == (30, 16, 64, 60)
    given = tomllib.loads(FILES["environment.toml"])["tasks"]["guess"]["agent_options"]
    environment = EnvironmentSettings(environment="games.Guess")
    assert all(getattr(environment, name) == given[name] for name in given if name != "options")
