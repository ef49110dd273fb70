"""Requests that real clients sent, in `tests/data/gateway`, long texts shortened: what they make of our answers is read
as those answers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import Call
from support.canned_gateway import PROTOCOLS

FOLDER = Path(__file__).parents[3] / "data" / "gateway"
RECORDED = {path.stem: orjson.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
LINEAR = [name for name, recorded in RECORDED.items() if recorded["answers"]]
"""Clients that add to their history, and do not rewrite it."""


def calls_of(name: str) -> list[Call]:
    recorded = RECORDED[name]
    protocol = PROTOCOLS[recorded["path"].partition("?")[0]]
    return [protocol.parse(body, {}) for body in recorded["bodies"]]


def summary(turn: Message) -> dict[str, Any]:
    """A message of the assistant in the form of `answers`."""
    functions = [call["function"] for call in turn.get("tool_calls", ())]
    calls = [[function["name"], orjson.loads(function["arguments"])] for function in functions]
    return {"content": turn["content"], "reasoning": turn.get("reasoning_content"), "calls": calls}


@pytest.mark.parametrize("name", LINEAR)
def test_answers_come_back_as_they_were(name: str) -> None:
    recorded = RECORDED[name]
    answers = [
        {**each, "reasoning": each["reasoning"] if recorded["keeps_thoughts"] else None} for each in recorded["answers"]
    ]
    for place, call in enumerate(calls_of(name)):
        turns = [summary(message) for message in call.messages if message["role"] == "assistant"]
        assert turns == answers[:place]


@pytest.mark.parametrize("name", LINEAR)
def test_a_request_starts_with_the_one_before_it(name: str) -> None:
    calls = calls_of(name)
    for before, after in pairwise(calls):
        assert after.messages[: len(before.messages)] == before.messages
        assert (after.tools, after.ignored[: len(before.ignored)]) == (before.tools, before.ignored)
        said, *results = after.messages[len(before.messages) :]
        made = said.get("tool_calls", ())
        assert [(result["role"], result.get("tool_call_id"), result.get("name")) for result in results] == (
            [("tool", call["id"], call["function"]["name"]) for call in made] or [("user", None, None)]
        )
        assert all(result["content"] for result in results)


def test_claude_code_is_read() -> None:
    call = calls_of("claude-code-messages")[0]
    assert [message["role"] for message in call.messages] == ["system", "user", "system"]
    assert "billing" not in call.messages[0]["content"]
    assert [tool["function"]["name"] for tool in call.tools] == ["Agent", "Bash", "Read"]
    assert call.ignored == ("thinking", "context_management", "output_config")
    assert (call.max_tokens, call.stream) == (64000, True)


def test_codex_is_read() -> None:
    call = calls_of("codex-responses")[0]
    assert [message["role"] for message in call.messages] == ["system", "system", "user", "user"]
    names = [tool["function"]["name"] for tool in call.tools]
    assert names == ["exec_command", "view_image", "multi_agent_v1__spawn_agent"]
    assert call.ignored == ("reasoning", "tools.web_search")
    assert call.stream


def test_a_subagent_of_codex_starts_its_own_history() -> None:
    first, child, parent = calls_of("codex-agent-responses")
    if "tool" not in [message["role"] for message in parent.messages]:
        child, parent = parent, child
    assert child.messages[-1] == {"role": "user", "content": "say hi"}
    assert parent.messages[: len(first.messages)] == first.messages
    assert parent.messages[-1]["name"] == "multi_agent_v1__spawn_agent"


def test_smolagents_rewrites_its_calls_as_text() -> None:
    first, second = calls_of("smolagents-chat")
    assert first.tool_choice == "required"
    assert first.stop == ("Observation:", "Calling tools:")
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2]["content"].startswith("Adding.\nCalling tools:\n")
