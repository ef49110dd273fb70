"""No body makes a protocol raise anything but a refusal, and whatever it accepts can be written as JSON."""

from copy import deepcopy
from dataclasses import asdict
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.common import exact_json
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import Call, CallProtocol, CallRefused
from rollq.workers.gateway.protocols import chat, completions, messages, responses
from support.canned_gateway import canned

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "number", "default": 1.5}}}
FUNCTION: Any = {"name": "add", "description": "Add.", "parameters": SCHEMA}
TEXT: Any = {"type": "text", "text": "a"}
BODIES: dict[ModuleType, Any] = {
    chat: {
        "model": "policy",
        "messages": [
            {"role": "system", "content": [TEXT]},
            {"role": "user", "content": "1 + 1?"},
            {
                "role": "assistant",
                "content": [TEXT, {"type": "refusal", "refusal": "no"}],
                "reasoning_content": "so",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [TEXT, {"type": "image_url"}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}, {"type": "custom"}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stop": ["a", "b"],
        "max_tokens": 5,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    },
    completions: {
        "model": "policy",
        "prompt": [[1, 2]],
        "stop": "a",
        "n": 1,
        "stream_options": {"include_usage": True},
    },
    messages: {
        "model": "policy",
        "system": [TEXT, {"type": "text", "text": "x-anthropic-billing-header: a"}],
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    TEXT,
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": [1.5]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, {"type": "image"}], "is_error": True},
                    TEXT,
                ],
            },
            {"role": "system", "content": "so"},
        ],
        "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}, {"type": "bash_1", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["a"],
        "max_tokens": 5,
    },
    responses: {
        "model": "policy",
        "instructions": "so",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1?"}]},
            {
                "type": "reasoning",
                "encrypted_content": "cm9sbHE6/w==",
                "summary": [{"type": "summary_text", "text": ""}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "namespace": "n", "name": "add", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "d", "name": "sh", "input": "ls"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "sh", "format": {"type": "grammar"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
    },
}


def deep(levels: int, kind: type) -> Any:
    """A value in so many objects or lists."""
    value: Any = "end"
    for _ in range(levels):
        value = {"content": value} if kind is dict else [value]
    return value


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        (None, True, 0, 1, -1, 2**63, 10**400, 1e300, float("nan"), float("inf"), "", "\ud800", "é", [], {}, [[]], [{}])
    ),
    st.text(st.characters(), max_size=5),
    st.sampled_from(("text", "image", "function_call", "tool_use", "assistant", "required")),
    st.builds(deep, st.sampled_from((200, 250, 900, 3000)), st.sampled_from((dict, list))),
)
CHANGES = st.lists(
    st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.sampled_from(("set", "delete", "add")), VALUES),
    max_size=3,
)
"""The way from the body to a place in it, and what happens there."""


def changed(body: Any, changes: list[tuple[list[int], str, Any]]) -> Any:
    """A copy of a body with changes."""
    body = [deepcopy(body)]
    for steps, act, value in changes:
        parent, key = body, 0
        for step in steps:
            inner = parent[key]
            if not inner or not isinstance(inner, dict | list):
                break
            parent, key = inner, list(inner)[step % len(inner)] if isinstance(inner, dict) else step % len(inner)
        if act == "set" or parent is body:
            parent[key] = value
        elif act == "delete":
            del parent[key]
        elif isinstance(parent, dict):
            parent["\udfff added"] = value
        else:
            parent.append(value)
    return body[0]


ANSWER = canned("so", ToolCall("n__add", {"a": 1}, "x", ""), ToolCall("sh", {}, "x", ""), reasoning="é")


def parsed(protocol: CallProtocol, body: Any, retries: str) -> Call | CallRefused:
    try:
        return protocol.parse(body, {"x-stainless-retry-count": retries})
    except CallRefused as refused:
        return refused


@pytest.mark.parametrize("protocol", BODIES)
def test_any_body_is_a_call_or_refused(protocol: CallProtocol) -> None:
    outcomes = set()

    @settings(max_examples=300, deadline=None)
    @given(changes=CHANGES, retries=st.text(max_size=4))
    def check(changes: list[tuple[list[int], str, Any]], retries: str) -> None:
        body = changed(BODIES[protocol], changes)  # type: ignore[index]
        outcome = parsed(protocol, body, retries)
        outcomes.add(type(outcome))
        if isinstance(outcome, CallRefused):
            assert outcome.status == 400
            assert orjson.dumps(protocol.error(outcome))
            return
        assert exact_json.dumps({"record": {"call": asdict(outcome)}})
        assert 0 <= outcome.repeats < 1000
        assert exact_json.dumps(protocol.answer(outcome, body, ANSWER))
        assert b"".join(protocol.events(outcome, body, ANSWER)).endswith(b"\n\n")

    check()
    assert outcomes == {Call, CallRefused}
