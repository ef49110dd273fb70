"""Claude Code and Codex, the real programs, against a real server. They are installed from npm on first use."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import CallRefused, context_full
from support.agent_programs import programs as installed
from support.canned_gateway import CannedGateway, canned
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CODEX = """
model = "policy"
model_provider = "rollq"
[model_providers.rollq]
name = "rollq"
base_url = "{url}/v1"
env_key = "KEY"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed()


def run(command: list[str], home: Path, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    base = {"PATH": os.environ["PATH"], "HOME": str(home), "IS_SANDBOX": "1"}
    return subprocess.run(
        command, cwd=home, env={**base, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip


def claude(programs: Path, server: CannedGateway, home: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(programs / "claude"), "-p", "Use Bash to print six.", "--allowedTools", "Bash"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return run(command, home, {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": "key", **quiet})


def codex(programs: Path, server: CannedGateway, home: Path) -> "subprocess.CompletedProcess[str]":
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=server.url))
    bare = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return run([str(programs / "codex"), "exec", *bare, "Use the shell to print six."], home, {"KEY": "key"})


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, "", orjson.dumps(arguments).decode())


AGENTS = [
    pytest.param(claude, call("Bash", command="echo s''ix", description="Print six"), id="claude"),
    pytest.param(codex, call("exec_command", cmd="echo s''ix"), id="codex"),
]


@pytest.mark.parametrize(("agent", "made"), AGENTS)
def test_an_agent_completes_an_exchange_with_tools(programs: Path, tmp_path: Path, agent: Any, made: ToolCall) -> None:
    first = canned("I will look.", made, made, reasoning="Let me run it.\n")
    with CannedGateway(first, canned("It printed six.", reasoning="Done.")) as server:
        ended = agent(programs, server, tmp_path)
        opening, second = server.calls
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "It printed six."
    assert second.messages[: len(opening.messages)] == opening.messages
    said, *results = second.messages[len(opening.messages) :]
    assert (said["content"], said["reasoning_content"]) == ("I will look.", "Let me run it.\n")
    assert [call["id"] for call in said["tool_calls"]] == ["call00000", "call00001"]
    # Claude Code sends results in the order in which its tools end
    assert sorted(result["tool_call_id"] for result in results) == ["call00000", "call00001"]
    assert {result["name"] for result in results} == {made.name}
    assert all("six" in result["content"] for result in results)


@pytest.mark.parametrize(("agent", "made"), AGENTS)
def test_an_agent_asks_again_after_503_and_ends_after_400(
    programs: Path, tmp_path: Path, agent: Any, made: ToolCall
) -> None:
    wait = CallRefused("wait", status=503, code="starting", retry_after_s=1)
    over = CallRefused("the session is over", code="session_over")
    with CannedGateway(wait, over, canned("2")) as server:
        ended = agent(programs, server, tmp_path)
        assert len(server.calls) == 2
    assert ended.returncode == 1
    assert "the session is over" in ended.stdout + ended.stderr


@pytest.mark.parametrize(("agent", "made"), AGENTS)
def test_an_agent_sees_that_its_context_is_full(programs: Path, tmp_path: Path, agent: Any, made: ToolCall) -> None:
    with CannedGateway(canned("", made), context_full(70_000, 65_536)) as server:
        ended = agent(programs, server, tmp_path)
    assert ended.returncode == 1
    known = {claude: "Prompt is too long", codex: "Codex ran out of room in the model's context window."}
    assert known[agent] in ended.stdout + ended.stderr


def test_codex_calls_tools_of_a_namespace(programs: Path, tmp_path: Path) -> None:
    spawn = call("multi_agent_v1__spawn_agent", message="say hi")
    with CannedGateway(canned("", spawn), *[canned("Hi.")] * 4) as server:
        ended = codex(programs, server, tmp_path)
        openings = [call.messages[-1]["content"] for call in server.calls]
    assert ended.returncode == 0, ended.stderr
    assert "say hi" in openings


def test_claude_code_starts_a_subagent(programs: Path, tmp_path: Path) -> None:
    spawn = call("Agent", description="Say hi", prompt="say hi", subagent_type="claude")
    with CannedGateway(canned("", spawn), canned("Hi."), canned("It said hi.")) as server:
        ended = claude(programs, server, tmp_path)
        _, child, parent = server.calls
    assert ended.returncode == 0, ended.stderr
    assert any(message["role"] == "user" and "say hi" in message["content"] for message in child.messages)
    assert parent.messages[-1]["role"] == "tool"
    assert parent.messages[-1]["name"] == "Agent"
    assert "Hi." in parent.messages[-1]["content"]


def test_codex_compacts_its_history_by_the_usage(programs: Path, tmp_path: Path) -> None:
    large = canned("", call("exec_command", cmd="echo 6"), prompt_tokens=260_000)
    with CannedGateway(large, canned("A summary."), canned("It printed six.")) as server:
        ended = codex(programs, server, tmp_path)
        _, summary, after = server.calls
    assert ended.stdout.strip() == "It printed six."
    assert summary.tools == ()
    assert after.messages[-1]["role"] == "user"
    assert after.messages[-1]["content"].endswith("A summary.")
