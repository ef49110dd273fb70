"""OpenAI's responses, `POST /v1/responses`. Pure.

Nothing is stored: a request holds all items so far. A thought is a reasoning item's summary, and its encrypted content
too if the caller asks for that; it comes back as either.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollq.buffer.common.mappings import without
from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import CONTEXT_FULL, Answer, Call, CallRefused, call_id
from rollq.workers.gateway.protocols import fields
from rollq.workers.gateway.protocols.responses_history import History, encrypted
from rollq.workers.gateway.protocols.responses_tools import CUSTOM_INPUT, callers_names, definitions
from rollq.workers.gateway.protocols.writing import arguments_of, event, openai_error

SERVED: Final = frozenset(
    ("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "include", "stream")
)
WITHOUT_EFFECT: Final = frozenset(
    ("store", "metadata", "client_metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "stream_options")
)  # fmt: skip
"""Fields that do not affect the answer."""
DEFAULTS: Final = {"parallel_tool_calls": True, "truncation": "disabled"}
REFUSED: Final = {
    "previous_response_id": "nothing is stored here, so send all items",
    "conversation": "nothing is stored here, so send all items",
    "prompt": "nothing is stored here, so send the text",
    "background": "wait for the answer",
}
CODES: Final = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}
"""Failure codes in a stream after which clients retry."""


def parse(body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
    """See `CallProtocol.parse`."""
    body = fields.mapping(body, "the body")
    fields.absent(body, REFUSED)
    _encrypts(body)
    tools, dropped = definitions(body)
    choice, named = fields.openai_choice(body.get("tool_choice"))
    form = fields.mapping(body.get("text") or {}, "text")
    has_tools = bool(tools) and choice != "none"
    schema, in_vain = fields.answer_schema(form.get("format"), "text.format", has_tools=has_tools)
    body = {**body, "text": without(form, {"format"})}
    history = History()
    if body.get("instructions") is not None:
        history.say("system", fields.text(body["instructions"], "instructions"))
    if isinstance(body.get("input"), str):
        history.say("user", fields.text(body["input"], "input"))
    else:
        for place, item in enumerate(fields.items(body.get("input"), "input")):
            history.add(fields.mapping(item, f"input[{place}]"), f"input[{place}]")
    fields.ends_with_others(history.messages, "input")
    return Call(
        model=fields.nonempty(body.get("model"), "model"),
        messages=tuple(history.messages),
        tools=tools,
        tool_choice=choice,
        max_tokens=fields.count(body.get("max_output_tokens"), "max_output_tokens"),
        schema=schema,
        stream=fields.flag(body.get("stream"), "stream"),
        repeats=fields.repeats(headers),
        ignored=(
            *fields.unused(body, SERVED | WITHOUT_EFFECT, DEFAULTS), *in_vain, *dropped, *named, *history.left_out,
        ),
    )  # fmt: skip


def _encrypts(body: Mapping[str, Any]) -> bool:
    """Whether the caller asks for thoughts in encrypted form."""
    return "reasoning.encrypted_content" in fields.texts(body.get("include"), "include")


def answer(call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """See `CallProtocol.answer`."""
    return _response(call, body, answer)


def _response(call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    cut = answer.finish_reason == FinishReason.LENGTH
    return {
        **_head(call, answer.number, answer.created_s),
        "status": "incomplete" if cut else "completed",
        "completed_at": answer.created_s,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(body, answer, "incomplete" if cut else "completed"),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.response_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.response_tokens,
        },
    }


def events(call: Call, body: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
    """See `CallProtocol.events`."""
    done = _response(call, body, answer)
    begun = _head(call, answer.number, answer.created_s)
    steps: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(done["output"]):
        place = {"output_index": index}
        steps.append(("output_item.added", {**place, "item": _empty(item)}))
        steps += [(kind, {**place, "item_id": item["id"], **data}) for kind, data in _filling(item)]
        steps.append(("output_item.done", {**place, "item": item}))
    steps.append((done["status"], {"response": done}))
    for number, (kind, data) in enumerate(steps):
        yield _event(kind, number, data)


def error(refused: CallRefused) -> dict[str, Any]:
    """See `CallProtocol.error`."""
    return openai_error(refused)


def error_events(call: Call, refused: CallRefused) -> Iterator[bytes]:
    """See `CallProtocol.error_events`."""
    if refused.code == CONTEXT_FULL:
        code = "context_length_exceeded"
    else:
        code = CODES.get(refused.status, "invalid_prompt" if refused.status < 500 else "server_error")
    problem = {"code": code, "message": refused.message}
    yield _event("failed", 0, {"response": {**_head(call, 0, 0), "status": "failed", "error": problem}})


def _event(kind: str, number: int, data: Mapping[str, Any]) -> bytes:
    kind = f"response.{kind}"
    return event({"type": kind, "sequence_number": number, **data}, kind)


def _head(call: Call, number: int, created_s: int) -> dict[str, Any]:
    """A response in progress, without the request's instructions and tools."""
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "max_tool_calls": None,
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": call.tool_choice,
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _items(body: Mapping[str, Any], answer: Answer, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        thought: dict[str, Any] = {"id": f"rs_{answer.number}", "type": "reasoning", "status": status}
        thought["summary"] = [{"type": "summary_text", "text": answer.reasoning}]
        if _encrypts(body):
            thought["encrypted_content"] = encrypted(answer.reasoning)
        items.append(thought)
    if answer.content or not answer.calls:
        said = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [said]})
    names = callers_names(body) if answer.calls else {}
    for index, call in enumerate(answer.calls):
        name = names.get(call.name, {"type": "function_call", "name": call.name})
        head = {"id": f"fc_{answer.number}_{index}", "call_id": call_id(answer.number, index), "status": status}
        items.append({**head, **name, **_given(call, name["type"])})
    return items


def _given(call: ToolCall, kind: str) -> dict[str, str]:
    """A call's arguments, or its text for a custom tool."""
    if kind != "custom_tool_call":
        return {"arguments": arguments_of(call)}
    text = call.arguments.get(CUSTOM_INPUT)
    return {"input": text if isinstance(text, str) else arguments_of(call)}


_PARTS: Final = {
    "reasoning": ("summary", "summary_index", "reasoning_summary_part", "reasoning_summary_text"),
    "message": ("content", "content_index", "content_part", "output_text"),
}
"""Item type -> the item's field with parts, the events' field with a part's index, and the names of a part's events and
of its text's events."""
_WHOLE: Final = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Item type -> the item's field with a text, and the name of the text's events."""


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item before it is filled."""
    if item["type"] in _PARTS:
        return {**item, "status": "in_progress", _PARTS[item["type"]][0]: []}
    return {**item, "status": "in_progress", _WHOLE[item["type"]][0]: ""}


def _filling(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The types and fields of the events that fill an item."""
    if item["type"] in _WHOLE:
        field, kind = _WHOLE[item["type"]]
        yield f"{kind}.delta", {"delta": item[field]}
        yield f"{kind}.done", {field: item[field], "name": item["name"]}
        return
    field, index, of_part, of_text = _PARTS[item["type"]]
    part = item[field][0]
    extra: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
    yield f"{of_part}.added", {index: 0, "part": {**part, "text": ""}}
    yield f"{of_text}.delta", {index: 0, "delta": part["text"], **extra}
    yield f"{of_text}.done", {index: 0, "text": part["text"], **extra}
    yield f"{of_part}.done", {index: 0, "part": part}
