"""The kind `mcp`: its expansion, its identity, and its check of real servers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import Finding, Level, kind_named, split_env
from rollq.workers.groups.agent_loops import make_loop
from support.mcp_servers import command, left, listening, plain_command

NAMES = "calculator count"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that several tests share."""
    with listening() as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left() == []


def errors(found: list[Finding]) -> list[str]:
    return [each.text for each in found if each.level is Level.ERROR]


def opened(env: str, **options: Any) -> Any:
    kind, name = split_env(env)
    return kind_named(kind).open(name, options, "train")


@pytest.mark.parametrize(
    ("env", "options"),
    [("mcp:http://127.0.0.1:8001/mcp", {"only": ["search"]}), ("mcp:python3 server.py", {"stateful": True})],
)
def test_a_server_becomes_tools_of_a_task_and_nothing_is_started_for_that(env: str, options: dict[str, Any]) -> None:
    source = opened(env, **options)
    tools = {"server": {"mcp": env.removeprefix("mcp:"), **options}}
    settings = source.settings()
    assert settings["agent_options"]["tools"]["server"].pop("folder", ".") == "."
    assert settings == {"agent_loop": "tools", "agent_options": {"tools": tools}}
    assert list(source.rows()) == []


def test_what_it_expands_to_is_a_loop() -> None:
    settings = opened(f"mcp:{plain_command()}").settings()
    make_loop(settings["agent_loop"], settings["agent_options"])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("python3 server.py", {"headers": {"a": "B"}}, "headers are for the URL of an MCP server"),
        ("http://desk/mcp", {"max_turns": 3}, r"env_options\.max_turns: unknown key"),
        ("http://desk/mcp", {"function": "a.b"}, "mcp and function exclude each other"),
    ],
)
def test_options_that_are_none_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(f"mcp:{name}", **options)


def test_its_identity_names_the_tools_and_changes_with_them(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text(NAMES)
    before = opened(f"mcp:{plain_command(names)}").identity()
    assert before["tools"] == "calculator, count"
    assert opened(f"mcp:{plain_command(names)}").identity() == before
    names.write_text("calculator")
    assert opened(f"mcp:{plain_command(names)}").identity()["digest"] != before["digest"]


@pytest.mark.parametrize("stateful", [False, True])
def test_the_check_of_a_good_server_finds_no_fault(url: str, stateful: bool) -> None:
    found = list(opened(f"mcp:{url}", stateful=stateful).check([]))
    assert errors(found) == []
    assert any(each.text.startswith("16 sessions opened in") for each in found)


def test_the_check_of_a_command_finds_no_fault() -> None:
    found = list(opened(f"mcp:{command()}").check([]))
    assert errors(found) == []
    assert found[0].text.startswith("9 tools: calculator, count")


def test_the_check_of_a_server_that_is_not_there_says_so() -> None:
    found = list(opened("mcp:http://127.0.0.1:1/mcp", start_timeout_s=0.5).check([]))
    [text] = errors(found)
    assert "All connection attempts failed" in text


@pytest.mark.long
def test_the_check_finds_tools_that_change_by_themselves(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import os\nfrom mcp.server.mcpserver import MCPServer\nserver = MCPServer('x')\n"
        "@server.tool(description=f'my process is {os.getpid()}')\ndef where() -> str: return ''\nserver.run()\n"
    )
    [text] = errors(list(opened(f"mcp:{sys.executable} {program}").check([])))
    assert "16 of 16 concurrent sessions failed: the tools of MCP server 'server' have changed" in text
    assert text.endswith("(changed: where): restart the workers")


def test_the_check_names_a_schema_that_is_none(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("broken")
    [text] = errors(list(opened(f"mcp:{plain_command(names)}").check([])))
    assert "tool 'broken' has an invalid JSON schema: 'objekt' is not valid" in text
