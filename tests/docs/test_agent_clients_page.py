"""docs/guide/agent-clients.md: each program in examples/clients runs as a harness, and its calls become segments.

The SDKs are installed with rollq's tests. The slow tests install each other client into a separate environment, on
first use, from the package index or from npm.
"""

import sys
from pathlib import Path

import pytest

from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from support.agent_programs import CLIENTS as INSTALLED
from support.agent_programs import node_modules, programs, python_with
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.documented_commands import ROOT
from support.gateway_calls import run, trained_tokens

PAGE = ROOT / "docs" / "guide" / "agent-clients.md"
FOLDER = ROOT / "examples" / "clients"
CLIENTS = {path.stem.removeprefix("with_"): path.read_text("utf-8") for path in FOLDER.iterdir() if path.is_file()}
WITH_A_TOOL = [call("calculator", expression="6*7"), "It is 42"]
DSPY = "[[ ## next_thought ## ]]\n[[ ## next_tool_name ## ]]\n{}\n[[ ## next_tool_args ## ]]\n{}\n[[ ## completed ## ]]"
WORDS = {
    "dspy": [
        DSPY.format("calculator", '{"expression": "6*7"}'),
        DSPY.format("finish", "{}"),
        "[[ ## reasoning ## ]]\n[[ ## answer ## ]]\nIt is 42\n[[ ## completed ## ]]",
    ],
    "instructor": [call("Result", product=42)],
    "smolagents": [WITH_A_TOOL[0], call("final_answer", answer="It is 42")],
}
"""Words of models whose clients do not call the calculator as the others do."""
MORE_WORDS = {
    "ag2": [*WITH_A_TOOL, "It is still 42"],
    "autogen": WITH_A_TOOL,
    "dspy": [
        "I do not know.",
        '{"next_thought": "", "next_tool_name": "finish", "next_tool_args": {}}',
        WORDS["dspy"][2],
    ],
    "inspect_ai": ["hello, world", *WITH_A_TOOL],
}
"""Words of models whose clients ask more than they need to."""
SEGMENTS = {"dspy": 3, "smolagents": 2}
"""Segments of clients that write their history anew."""
MINI_SWE_AGENT = "mini_swe_agent"


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


def shell(script: str, workspace: Path, program: Path) -> tuple[str, str]:
    """The command of a script that ends with a program, which gets its path."""
    assert f"\nexec {program.name} " in script
    (workspace / "agent.sh").write_text(script.replace(f"\nexec {program.name} ", f"\nexec {program} "))
    return "sh", "agent.sh"


def assert_it_is_42(sample: Sample, segments: int = 1) -> None:
    """The program printed the answer, and each of its calls is trained once."""
    output = sample.extra["harness"]["output"]
    assert sample.extra["harness"]["exit_code"] == 0, output
    assert output.endswith("It is 42"), output
    assert len(sample.segments) == segments
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def test_the_page_lists_every_program() -> None:
    page = PAGE.read_text("utf-8")
    assert [path.name for path in FOLDER.iterdir() if path.is_file() and f"/clients/{path.name})" not in page] == []


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_sdk_asks_once(client: str, workspace: Path) -> None:
    (workspace / "agent.py").write_text(CLIENTS[client])
    sample = sample_of(["It is 42"], workspace, sys.executable, "agent.py")
    assert sample.extra["harness"]["output"] == "It is 42"
    assert (sample.text, len(sample.segments)) == ("It is 42", 1)


@pytest.mark.slow
@pytest.mark.parametrize("client", [client for client in INSTALLED if client != MINI_SWE_AGENT])
def test_an_agent_uses_its_tool(client: str, workspace: Path) -> None:
    (workspace / "agent.py").write_text(CLIENTS[client])
    sample = sample_of(WORDS.get(client, WITH_A_TOOL), workspace, python_with(client), "agent.py")
    assert_it_is_42(sample, segments=SEGMENTS.get(client, 1))


@pytest.mark.slow
def test_vercels_ai_sdk_uses_its_tool(workspace: Path) -> None:
    (workspace / "agent.mjs").write_text(CLIENTS["ai_sdk"])
    (workspace / "node_modules").symlink_to(node_modules("ai_sdk"))
    assert_it_is_42(sample_of(WITH_A_TOOL, workspace, "node", "agent.mjs"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "setting", "without", "segments"),
    [
        ("ag2", ', executor_kwargs={"is_termination_msg": is_answer}', "", 1),
        ("autogen", "max_tool_iterations=10", "reflect_on_tool_use=True", 2),
        ("dspy", ", adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)", "", 3),
        ("inspect_ai", ', model_args={"responses_api": False}', "", 2),
    ],
)
def test_a_client_asks_more_without_its_setting(
    client: str, setting: str, without: str, segments: int, workspace: Path
) -> None:
    assert setting in CLIENTS[client]
    program = CLIENTS[client].replace(setting, without).replace("max_turns=20", "max_turns=3")
    (workspace / "agent.py").write_text(program)
    sample = sample_of(MORE_WORDS[client], workspace, python_with(client), "agent.py")
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert (len(sample.extra["calls"]), len(sample.segments)) == (len(MORE_WORDS[client]), segments)
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


@pytest.mark.slow
def test_opencode_uses_its_shell(workspace: Path) -> None:
    words = [call("bash", command="echo $((6*7))", description="Multiply"), "It is 42"]
    opencode = node_modules("opencode") / ".bin" / "opencode"
    assert_it_is_42(sample_of(words, workspace, *shell(CLIENTS["opencode"], workspace, opencode)))


@pytest.mark.slow
def test_opencode_asks_for_a_title_without_the_option(workspace: Path) -> None:
    script = CLIENTS["opencode"].replace(" --title sums", "")
    opencode = node_modules("opencode") / ".bin" / "opencode"
    sample = sample_of(["It is 42"] * 2, workspace, *shell(script, workspace, opencode))
    assert len(sample.extra["calls"]) == 2


@pytest.mark.slow
def test_qwen_code_uses_its_shell(workspace: Path) -> None:
    words = [
        call("run_shell_command", command="echo $((6*7))", description="Multiply", is_background=False),
        "It is 42",
    ]
    qwen = node_modules("qwen_code") / ".bin" / "qwen"
    assert_it_is_42(sample_of(words, workspace, *shell(CLIENTS["qwen_code"], workspace, qwen)))


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "calls"), [("false", 1), ("true", 2)])
def test_qwen_code_writes_notes_only_with_its_memory(setting: str, calls: int, workspace: Path) -> None:
    script = CLIENTS["qwen_code"].replace('"enableManagedAutoMemory": false', f'"enableManagedAutoMemory": {setting}')
    qwen = node_modules("qwen_code") / ".bin" / "qwen"
    sample = sample_of(["It is 42"] * 2, workspace, *shell(script, workspace, qwen))
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert len(sample.extra["calls"]) == calls


@pytest.mark.slow
def test_mini_swe_agent_uses_its_shell(workspace: Path) -> None:
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is 42"
    words = [call("bash", command="echo $((6*7))"), call("bash", command=done)]
    mini = Path(python_with(MINI_SWE_AGENT)).parent / "mini"
    sample = sample_of(words, workspace, *shell(CLIENTS[MINI_SWE_AGENT], workspace, mini))
    output = sample.extra["harness"]["output"]
    assert sample.extra["harness"]["exit_code"] == 0, output
    assert "It is 42" in output
    assert (len(sample.segments), len(sample.extra["calls"])) == (1, 2)


@pytest.mark.slow
def test_codex_reads_its_settings(workspace: Path) -> None:
    command = shell(CLIENTS["codex"], workspace, programs() / "codex")
    sample = sample_of(["It is 42"], workspace, *command)
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert (sample.text, len(sample.segments)) == ("It is 42", 1)
