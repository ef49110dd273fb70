"""OpenAI's chat completions, `POST /v1/chat/completions`. Pure.

Thoughts are in `reasoning_content`, as servers of open models return them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import Answer, Call, CallRefused, call_id
from rollq.workers.gateway.protocols import fields
from rollq.workers.gateway.protocols.writing import DONE, arguments_of, event, openai_error, openai_finish, openai_usage

SERVED: Final = frozenset(
    ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
     "response_format", "chat_template_kwargs")
)  # fmt: skip
WITHOUT_EFFECT: Final = frozenset(
    ("stream_options", "n", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
)
"""Fields that do not affect the answer."""
DEFAULTS: Final = {"parallel_tool_calls": True, "modalities": ["text"], "add_generation_prompt": True}
REFUSED: Final = {
    "audio": "this model answers in text",
    "functions": "define `tools`",
    "function_call": "set `tool_choice`",
    "web_search_options": "define a tool that searches",
    "continue_final_message": "no caller can start an answer",
}
TEXTS: Final = ("text",)


def parse(body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
    """See `CallProtocol.parse`."""
    body = fields.mapping(body, "the body")
    fields.absent(body, REFUSED)
    fields.one_answer(body, "n")
    fields.wants_usage(body)
    left_out: dict[str, None] = {}
    messages = _messages(body, left_out)
    tools, without = _tools(body)
    choice, named = fields.openai_choice(body.get("tool_choice"))
    has_tools = bool(tools) and choice != "none"
    form = body.get("response_format")
    schema, in_vain = fields.answer_schema(form, "response_format", has_tools=has_tools, holder="json_schema")
    limit = fields.count(body.get("max_completion_tokens"), "max_completion_tokens")
    return Call(
        model=fields.nonempty(body.get("model"), "model"),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        max_tokens=limit or fields.count(body.get("max_tokens"), "max_tokens"),
        stop=fields.texts(body.get("stop"), "stop"),
        schema=schema,
        stream=fields.flag(body.get("stream"), "stream"),
        repeats=fields.repeats(headers),
        template_options=fields.mapping(body.get("chat_template_kwargs") or {}, "chat_template_kwargs"),
        ignored=(*fields.unused(body, SERVED | WITHOUT_EFFECT, DEFAULTS), *in_vain, *without, *named, *left_out),
    )


def answer(call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """See `CallProtocol.answer`."""
    head = _head(call, answer, "chat.completion")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if answer.calls and not answer.content else answer.content,
        "refusal": None,
    }
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": openai_finish(answer)}
    return {**head, "choices": [choice], "usage": openai_usage(answer)}


def events(call: Call, body: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
    """See `CallProtocol.events`."""
    with_usage = fields.wants_usage(body)
    head = {**_head(call, answer, "chat.completion.chunk"), **({"usage": None} if with_usage else {})}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**head, "choices": [choice]})

    yield from map(chunk, _deltas(answer))
    yield chunk({}, openai_finish(answer))
    if with_usage:
        yield event({**head, "choices": [], "usage": openai_usage(answer)})
    yield DONE


def _deltas(answer: Answer) -> Iterator[Mapping[str, Any]]:
    """The parts of the answer's message, in order."""
    yield {"role": "assistant", "content": None if answer.calls and not answer.content else ""}
    if answer.reasoning is not None:
        yield {"reasoning_content": answer.reasoning}
    if answer.content:
        yield {"content": answer.content}
    for index, made in enumerate(_calls(answer)):
        yield {"tool_calls": [{"index": index, **made}]}


def error(refused: CallRefused) -> dict[str, Any]:
    """See `CallProtocol.error`."""
    return openai_error(refused)


def error_events(call: Call, refused: CallRefused) -> Iterator[bytes]:
    """See `CallProtocol.error_events`."""
    yield event(openai_error(refused))


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": answer.created_s,
        "model": call.model,
        "system_fingerprint": None,
        "service_tier": None,
    }


def _calls(answer: Answer) -> list[Message]:
    return [
        fields.tool_call(call_id(answer.number, index), made.name, arguments_of(made))
        for index, made in enumerate(answer.calls)
    ]


def _messages(body: Mapping[str, Any], left_out: dict[str, None]) -> tuple[Message, ...]:
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    messages: list[Message] = []
    has_result = False
    for place, raw in enumerate(fields.items(body.get("messages"), "messages")):
        where = f"messages[{place}]"
        message = fields.mapping(raw, where)
        if message.get("role") == "user":
            said = fields.content(
                message.get("content"), f"{where}.content", TEXTS, left_out=left_out if has_result else None
            )
            messages.append({"role": "user", "content": said})
        else:
            messages.append(_message(message, where, names, left_out))
            has_result = has_result or messages[-1]["role"] == "tool"
    fields.ends_with_others(messages, "messages")
    return tuple(messages)


def _message(message: Mapping[str, Any], where: str, names: dict[str, str], left_out: dict[str, None]) -> Message:
    """Convert a message whose role is not the user's."""
    role = message.get("role")
    said = message.get("content")
    if role in ("system", "developer"):
        return {"role": "system", "content": fields.content(said, f"{where}.content", TEXTS)}
    if role == "tool":
        id = fields.text(message.get("tool_call_id"), f"{where}.tool_call_id")
        result = fields.content(said, f"{where}.content", TEXTS, left_out=left_out)
        return fields.tool_result(id, names.get(id), result)
    if role == "assistant":
        return _assistant(message, where, names)
    raise CallRefused(f"{where}.role must be system, developer, user, assistant or tool")


def _assistant(message: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    said = fields.content(message.get("content"), f"{where}.content", ("text", "refusal"), between="")
    turn: dict[str, Any] = {"role": "assistant", "content": said}
    for field in ("reasoning_content", "reasoning"):
        if message.get(field) is not None:
            turn["reasoning_content"] = fields.text(message[field], f"{where}.{field}")
            break
    calls = []
    for place, call in enumerate(fields.items(message.get("tool_calls"), f"{where}.tool_calls")):
        at = f"{where}.tool_calls[{place}]"
        function = fields.mapping(fields.mapping(call, at).get("function"), f"{at}.function")
        id = fields.text(call.get("id"), f"{at}.id")
        names[id] = fields.nonempty(function.get("name"), f"{at}.function.name")
        calls.append(
            fields.tool_call(id, names[id], fields.text(function.get("arguments"), f"{at}.function.arguments"))
        )
    if calls:
        turn["tool_calls"] = calls
    return turn


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], list[str]]:
    """The function definitions, and the names of left-out tools."""
    tools, ignored = [], []
    for place, tool in enumerate(fields.items(body.get("tools"), "tools")):
        kind = fields.mapping(tool, f"tools[{place}]").get("type")
        if kind != "function":
            ignored.append(f"tools.{fields.label(kind)}")
            continue
        where = f"tools[{place}].function"
        function = fields.mapping(tool.get("function"), where)
        name = fields.nonempty(function.get("name"), f"{where}.name")
        tools.append(fields.definition(name, function.get("description"), function.get("parameters"), where))
    return tuple(tools), ignored
