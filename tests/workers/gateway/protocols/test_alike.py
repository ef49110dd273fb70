"""The same request in all protocols has the same effect."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollq.workers.gateway.calls import CallProtocol, CallRefused
from rollq.workers.gateway.protocols import chat, messages, responses
from rollq.workers.gateway.protocols.fields import UNREADABLE
from support.chat_engine import Model, chat_tokenizer
from support.gateway_calls import make_session, run, serve

PNG = "data:image/png;base64,AAAA"
CHAT_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "Look."}
TEXT = {"type": "text", "text": "A screen:"}
CHAT = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": "see below"},
    {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": PNG}}]},
]
MESSAGES = [
    USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "call00000", "name": "look", "input": {}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call00000", "content": "see below"},
            TEXT,
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ],
    },
]
RESPONSES = [
    USER,
    {"type": "function_call", "call_id": "call00000", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call00000", "output": "see below"},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "A screen:"}, {"type": "input_image", "image_url": PNG}],
    },
]
WAYS: list[tuple[CallProtocol, str, list[Any]]] = [
    (chat, "messages", CHAT), (messages, "messages", MESSAGES), (responses, "input", RESPONSES),
]  # fmt: skip
ALIKE = pytest.mark.parametrize(("protocol", "field", "history"), WAYS, ids=["chat", "messages", "responses"])


def body_of(field: str, history: list[Any], **more: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    return {"model": "m", limit: 50, field: history, **more}


@ALIKE
def test_a_picture_after_a_tools_result_is_replaced_and_counted(
    protocol: CallProtocol, field: str, history: list[Any], tmp_path: Path
) -> None:
    later = [*history, {"role": "assistant", "content": "Blue."}, history[-1], USER]
    session = make_session(Model(chat_tokenizer(tmp_path), ["Blue.", "Red."]))
    for asked in (history, later):
        call = protocol.parse(body_of(field, asked), {})
        assert call.messages[3] == {"role": "user", "content": f"A screen:\n{UNREADABLE}"}
        run(partial(serve, session, call))
    (name,) = call.ignored
    assert session.sample(extra={}).extra["ignored"] == {name: 2}


@ALIKE
def test_a_picture_before_any_result_is_refused(protocol: CallProtocol, field: str, history: list[Any]) -> None:
    alone = [block for block in history[-1]["content"] if block["type"] != "tool_result"]
    with pytest.raises(CallRefused, match=r"reads .*text"):
        protocol.parse(body_of(field, [{"role": "user", "content": alone}]), {})


@ALIKE
@pytest.mark.parametrize("last", ["words", "calls"])
def test_a_conversation_that_ends_with_the_assistants_is_refused(
    protocol: CallProtocol, field: str, history: list[Any], last: str
) -> None:
    asked = [USER, {"role": "assistant", "content": "The answer is"}] if last == "words" else history[:2]
    with pytest.raises(CallRefused, match="must not end with the assistant's: callers cannot start an answer"):
        protocol.parse(body_of(field, asked), {})


def test_no_message_is_continued() -> None:
    with pytest.raises(CallRefused, match="continue_final_message is not supported"):
        chat.parse(body_of("messages", [USER], continue_final_message=True), {})
    assert chat.parse(body_of("messages", [USER], add_generation_prompt=True), {}).ignored == ()
    assert chat.parse(body_of("messages", [USER], add_generation_prompt=False), {}).ignored == (
        "add_generation_prompt",
    )
