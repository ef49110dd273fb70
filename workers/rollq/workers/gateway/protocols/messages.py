"""Anthropic's messages, `POST /v1/messages` and `POST /v1/messages/count_tokens`. Pure.

Thoughts are blocks of type `thinking`, whose signature identifies the answer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from rollq.buffer.common.mappings import without
from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import Answer, Call, CallRefused, ToolChoice, call_id
from rollq.workers.gateway.protocols import fields
from rollq.workers.gateway.protocols.writing import arguments_of, event

SERVED: Final = frozenset(
    ("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream")
)
WITHOUT_EFFECT: Final = frozenset(("metadata", "service_tier", "cache_control", "inference_geo"))
"""Fields that do not affect the answer."""
CHOICES: Final[Mapping[str, ToolChoice]] = {"auto": "auto", "any": "required", "none": "none", "tool": "auto"}
BILLING: Final = "x-anthropic-billing-header:"
"""The start of a text in Claude Code's system prompt. This text depends on the first prompt and is not for the
model."""
ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
TEXTS: Final = ("text",)


def parse(body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
    """See `CallProtocol.parse`."""
    body = fields.mapping(body, "the body")
    left_out: dict[str, None] = {}
    messages = _messages(body, left_out)
    tools, dropped = _tools(body)
    choice, named = _choice(body.get("tool_choice"))
    config = fields.mapping(body.get("output_config") or {}, "output_config")
    form = config.get("format") or body.get("output_format")
    has_tools = bool(tools) and choice != "none"
    schema, in_vain = fields.answer_schema(form, "output_config.format", has_tools=has_tools)
    return Call(
        model=fields.nonempty(body.get("model"), "model"),
        messages=(*_system(body.get("system")), *messages),
        tools=tools,
        tool_choice=choice,
        max_tokens=fields.count(body.get("max_tokens"), "max_tokens"),
        stop=fields.texts(body.get("stop_sequences"), "stop_sequences"),
        schema=schema,
        stream=fields.flag(body.get("stream"), "stream"),
        repeats=fields.repeats(headers),
        ignored=(
            *fields.unused(_without_format(body), SERVED | WITHOUT_EFFECT, {}),
            *dropped,
            *named,
            *in_vain,
            *left_out,
        ),
    )


def _without_format(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body without the answer's format. The other parts of `output_config` have no effect."""
    return {**body, "output_config": without(body.get("output_config") or {}, {"format"}), "output_format": None}


def answer(call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """See `CallProtocol.answer`."""
    return {
        **_head(call, answer),
        "content": [_whole(block) for block in _blocks(answer)],
        **_end(answer),
        "usage": _usage(answer, answer.response_tokens),
    }


def events(call: Call, body: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
    """See `CallProtocol.events`."""
    start = {**_head(call, answer), "content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
    yield _event("message_start", message={**start, "usage": _usage(answer, 0)})
    for index, block in enumerate(_blocks(answer)):
        first, deltas = _stream(block)
        yield _event("content_block_start", index=index, content_block=first)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(answer), usage=_usage(answer, answer.response_tokens))
    yield _event("message_stop")


def error(refused: CallRefused) -> dict[str, Any]:
    """See `CallProtocol.error`."""
    kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    problem = {"type": kind, "message": refused.message, "code": refused.code}
    return {"type": "error", "error": problem, "request_id": None}


def error_events(call: Call, refused: CallRefused) -> Iterator[bytes]:
    """See `CallProtocol.error_events`."""
    yield event(error(refused), "error")


def token_count(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`, whose request `parse` reads."""
    return {"input_tokens": tokens}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _head(call: Call, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "container": None,
    }


def _end(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == FinishReason.LENGTH:
        reason = "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop_text is None else "stop_sequence"
    stopped = answer.stop_text if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped, "stop_details": None}


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """The answer's blocks. A tool's input is JSON, as the model wrote it."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": f"answer-{answer.number}"})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content, "citations": None})
    for index, call in enumerate(answer.calls):
        id = call_id(answer.number, index)
        blocks.append({"type": "tool_use", "id": id, "name": call.name, "input": arguments_of(call)})
    return blocks


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    """The block for an answer that does not stream."""
    return {**block, "input": orjson.Fragment(block["input"])} if block["type"] == "tool_use" else block


def _stream(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The start of a block, and the events that fill it."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signature]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": block["input"]}]


def _system(system: Any) -> tuple[Message, ...]:
    """The system message, without Claude Code's text for billing."""
    if isinstance(system, list | tuple):
        system = [block for block in system if not _bills(block)]
    said = fields.content(system, "system", TEXTS)
    return ({"role": "system", "content": said},) if said else ()


def _bills(block: Any) -> bool:
    said = block.get("text") if isinstance(block, Mapping) else None
    return isinstance(said, str) and said.startswith(BILLING)


def _messages(body: Mapping[str, Any], left_out: dict[str, None]) -> tuple[Message, ...]:
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    messages: list[Message] = []
    has_result = False
    for place, raw in enumerate(fields.items(body.get("messages"), "messages")):
        where = f"messages[{place}]"
        message = fields.mapping(raw, where)
        role = message.get("role")
        if role == "user":
            said = message.get("content")
            has_result = has_result or _has_result(said)
            messages += _user(said, f"{where}.content", names, left_out, has_result=has_result)
        elif role == "assistant":
            messages.append(_assistant(message.get("content"), f"{where}.content", names, left_out))
        elif role == "system":
            said = fields.content(message.get("content"), f"{where}.content", TEXTS)
            messages.append({"role": "system", "content": said})
        else:
            raise CallRefused(f"{where}.role must be user, assistant or system")
    fields.ends_with_others(messages, "messages")
    return tuple(messages)


def _has_result(said: Any) -> bool:
    """Whether a user's message has a block with a tool's result."""
    blocks = said if isinstance(said, list | tuple) else ()
    return any(isinstance(block, Mapping) and block.get("type") == "tool_result" for block in blocks)


def _user(
    said: Any, where: str, names: Mapping[str, str], left_out: dict[str, None], *, has_result: bool
) -> list[Message]:
    """The tool results, and the joined texts between them. After a result, unreadable blocks are left out."""
    if not isinstance(said, list | tuple):
        return [{"role": "user", "content": fields.content(said, where, TEXTS)}]
    messages: list[Message] = []
    texts: list[str] = []

    def end_texts() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for place, raw in enumerate(said):
        at = f"{where}[{place}]"
        block = fields.mapping(raw, at)
        if block.get("type") == "tool_result":
            end_texts()
            messages.append(_result(block, at, names, left_out))
        else:
            texts.append(fields.block_text(block, at, ("text", "tool_result"), left_out if has_result else None))
    end_texts()
    return messages


def _result(block: Mapping[str, Any], at: str, names: Mapping[str, str], left_out: dict[str, None]) -> Message:
    id = fields.text(block.get("tool_use_id"), f"{at}.tool_use_id")
    content = fields.content(block.get("content"), f"{at}.content", TEXTS, left_out=left_out)
    failed = fields.flag(block.get("is_error"), f"{at}.is_error")
    return fields.tool_result(id, names.get(id), content or ("Error" if failed else ""))


def _assistant(said: Any, where: str, names: dict[str, str], left_out: dict[str, None]) -> Message:
    if not isinstance(said, list | tuple):
        return {"role": "assistant", "content": fields.content(said, where, TEXTS)}
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for place, raw in enumerate(said):
        at = f"{where}[{place}]"
        block = fields.mapping(raw, at)
        kind = block.get("type")
        if kind == "thinking":
            thought = fields.text(block.get("thinking"), f"{at}.thinking")
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        elif kind == "redacted_thinking":
            left_out["messages.redacted_thinking"] = None
        elif kind == "tool_use":
            id = fields.text(block.get("id"), f"{at}.id")
            names[id] = fields.nonempty(block.get("name"), f"{at}.name")
            calls.append(fields.tool_call(id, names[id], fields.json_text(block.get("input"), f"{at}.input")))
        else:
            turn["content"] += fields.block_text(block, at, ("text", "thinking", "tool_use"))
    if calls:
        turn["tool_calls"] = calls
    return turn


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], list[str]]:
    """The tool definitions, and the names of the server's tools, which are left out."""
    tools, ignored = [], []
    for place, raw in enumerate(fields.items(body.get("tools"), "tools")):
        where = f"tools[{place}]"
        tool = fields.mapping(raw, where)
        if tool.get("type") in (None, "custom"):
            name = fields.nonempty(tool.get("name"), f"{where}.name")
            tools.append(fields.definition(name, tool.get("description"), tool.get("input_schema"), where))
        else:
            ignored.append(f"tools.{fields.label(tool['type'])}")
    return tuple(tools), ignored


def _choice(raw: Any) -> tuple[ToolChoice, tuple[str, ...]]:
    """The tool choice, and the names of choices without effect."""
    if raw is None:
        return "auto", ()
    choice = fields.mapping(raw, "tool_choice")
    kind = fields.text(choice.get("type"), "tool_choice.type")
    if kind not in CHOICES:
        raise CallRefused(f"tool_choice.type must be one of {', '.join(CHOICES)}")
    alone = fields.flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    ignored = ["tool_choice"] if kind == "tool" else []
    return CHOICES[kind], (*ignored, *(["tool_choice.disable_parallel_tool_use"] if alone else []))
