"""Typed access to the JSON of requests. Pure.

Each function takes a value and its name as the caller wrote it, such as `messages[2].content`, and raises `CallRefused`
with that name if the value has a different type. orjson has read the values, so writing them as JSON cannot fail.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import ROOM, nested
from rollq.workers.gateway.calls import CallRefused, ToolChoice

RETRY_COUNT: Final = "x-stainless-retry-count"
"""A header from OpenAI's and Anthropic's SDKs: how often this request was sent before."""

UNREADABLE: Final = "(This model cannot read what is here.)"
"""Replaces a block that is not text, such as an image, in a tool's result, or in the user's message after a result,
where clients put images made by tools. The model chose to look at the image, and can choose again."""

_MOST: Final = 2**31 - 1
_LABEL: Final = 40


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    return value


def items(value: Any, name: str) -> Sequence[Any]:
    """A list; None is an empty list."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(name, "a list", value)
    return value


def text(value: Any, name: str) -> str:
    """A string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CallRefused(f"{name} has half of a surrogate pair, which is not a character") from None
    return value


def nonempty(value: Any, name: str) -> str:
    """A string that is not empty."""
    checked = text(value, name)
    if not checked:
        raise CallRefused(f"{name} must not be empty")
    return checked


def flag(value: Any, name: str) -> bool:
    """True or false; None is false."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def count(value: Any, name: str) -> int | None:
    """A positive integer that fits in int32, or None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, "a positive integer", value)
    return min(value, _MOST)


def texts(value: Any, name: str) -> tuple[str, ...]:
    """Strings that are not empty: a list, a single string, or None."""
    if isinstance(value, str):
        value = [value]
    checked = tuple(text(each, f"{name}[{place}]") for place, each in enumerate(items(value, name)))
    if "" in checked:
        raise CallRefused(f"{name} must not have an empty string")
    return checked


def content(
    value: Any, name: str, kinds: Collection[str], between: str = "\n", left_out: dict[str, None] | None = None
) -> str:
    """The text of a message: a string, None, or a list of blocks with types in `kinds`, joined by `between`.

    Other blocks are refused, unless `left_out` collects their names; then `UNREADABLE` takes their place.
    """
    if value is None or isinstance(value, str):
        return text(value or "", name)
    blocks = enumerate(items(value, name))
    return between.join(block_text(block, f"{name}[{place}]", kinds, left_out) for place, block in blocks)


def block_text(block: Any, name: str, kinds: Collection[str], left_out: dict[str, None] | None = None) -> str:
    """The text of one block; see `content`."""
    kind = mapping(block, name).get("type")
    if kind in kinds:
        field = "refusal" if kind == "refusal" else "text"
        return text(block.get(field), f"{name}.{field}")
    if left_out is None:
        raise CallRefused(f"{name} is {label(kind)}, and this model reads {', '.join(kinds)} alone")
    left_out[f"messages.{label(kind)}"] = None
    return UNREADABLE


def json_text(value: Any, name: str) -> str:
    """An object as JSON."""
    try:
        return exact_json.dumps(nested(mapping(value, name)))[ROOM:-ROOM].decode()
    except (TypeError, RecursionError) as error:
        raise CallRefused(f"{name} cannot be written as JSON: {error}") from None


def definition(tool: str, description: Any, parameters: Any, where: str) -> Message:
    """A tool's definition, as in chat completions. `where` names the tool in errors."""
    function: dict[str, Any] = {"name": tool}
    if description is not None:
        function["description"] = text(description, f"{where}.description")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    json_text(parameters, f"the parameters of {where}")
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def tool_call(id: str, name: str, arguments: str) -> Message:
    """A tool call as in chat completions, with `arguments` as JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def tool_result(id: str, name: str | None, content: str) -> Message:
    """The message with a tool's result. `name` is the tool's name, None if no message has the call."""
    named = {} if name is None else {"name": name}
    return {"role": "tool", "content": content, "tool_call_id": id, **named}


def ends_with_others(messages: Sequence[Message], name: str) -> None:
    """Refuse a conversation that is empty or ends with the assistant's message."""
    if not messages:
        raise CallRefused(f"{name} must not be empty")
    if messages[-1]["role"] == "assistant":
        raise CallRefused(f"{name} must not end with the assistant's: callers cannot start an answer")


def openai_choice(value: Any) -> tuple[ToolChoice, tuple[str, ...]]:
    """OpenAI's tool choice, and the names of choices without effect: a single tool."""
    if value is None:
        return "auto", ()
    if value in ("auto", "none", "required"):
        return value, ()
    mapping(value, "tool_choice")
    return "auto", ("tool_choice",)


def answer_schema(
    form: Any, name: str, *, has_tools: bool, holder: str | None = None
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """The JSON schema that an answer in this form follows (None for any text), and the names of fields without effect.

    `holder` names the form's field that holds the schema, unless the form itself does. An answer that follows a schema
    cannot hold a call: beside tools, a schema is refused, and `json_object` has no effect.
    """
    kind = None if form is None else mapping(form, name).get("type")
    if form is None or kind == "text":
        return None, ()
    if kind == "json_object":
        return (None, (name,)) if has_tools else ({"type": "object"}, ())
    if kind != "json_schema":
        raise CallRefused(f"{name}.type must be text, json_object or json_schema")
    if has_tools:
        raise CallRefused(
            f"{name} would keep the model from calling its tools: ask for the object in a request without tools, or "
            "with a tool that takes it"
        )
    where = name if holder is None else f"{name}.{holder}"
    schema = mapping((form if holder is None else mapping(form.get(holder), where)).get("schema"), f"{where}.schema")
    json_text(schema, f"{where}.schema")
    return schema, ()


def unused(body: Mapping[str, Any], served: Collection[str], defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of fields that are set, but neither `served` nor equal to their `defaults`."""
    return tuple(
        label(field)
        for field, value in body.items()
        if field not in served and not _is_default(value, defaults.get(field))
    )


def _is_default(value: Any, default: Any) -> bool:
    if value is None or default is not None:
        return value is None or bool(value == default)
    return value is False or value in ("", [], {})


def absent(body: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Refuse a body in which a field of `remedies` is set."""
    for field, remedy in remedies.items():
        if body.get(field) not in (None, False, [], {}, ""):
            raise CallRefused(f"{field} is not supported: {remedy}")


def one_answer(body: Mapping[str, Any], name: str) -> None:
    """Refuse a request for more than one answer."""
    if count(body.get(name), name) not in (None, 1):
        raise CallRefused(f"{name} must be 1: ask for one answer at a time")


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream of completions ends with its usage."""
    options = body.get("stream_options")
    return options is not None and flag(
        mapping(options, "stream_options").get("include_usage"), "stream_options.include_usage"
    )


def label(value: Any) -> str:
    """A short name for a request's value, which an error or log may quote."""
    if isinstance(value, str):
        return value[:_LABEL] if value.isascii() and value.isprintable() else ascii(value[:_LABEL])
    return _KINDS.get(type(value), "another value")


def repeats(headers: Mapping[str, str]) -> int:
    """The number of times that an SDK says it has sent this request before."""
    said = headers.get(RETRY_COUNT, "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 4 else 0


def _wrong(name: str, wanted: str, value: Any) -> CallRefused:
    return CallRefused(f"{name} must be {wanted}, not {_KINDS.get(type(value), 'another value')}")


_KINDS: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "a boolean",
    int: "this number",
    float: "this number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
