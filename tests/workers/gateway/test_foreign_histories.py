"""Histories that the session's model did not write, through the templates of many families: the model reads what
transformers makes of the same messages, with the arguments of calls as the family's template takes them."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import CallProtocol, CallRefused
from rollq.workers.gateway.protocols import chat, messages, responses
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model
from support.chat_families import BUILT_IN, TOOL, Family, family_tokenizer
from support.gateway_calls import make_session, run, serve

JSON_ALONE = {"DeepSeek-V3", "DeepSeek-V3.1"}
"""Families whose templates take arguments as JSON alone."""
FAMILIES = (
    "Qwen2.5", "Qwen3", "Qwen3-Coder", "Qwen3.6", "Llama 3.1", "Llama 3.2", "Mistral Nemo", "Ministral 3",
    "DeepSeek-V3", "DeepSeek-R1-0528", "DeepSeek-V3.1", "GPT-OSS", "GLM-4.5", "GLM-4.7",
)  # fmt: skip
LARGE = 12345678901234567890124


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def calling(*arguments: Any, content: str | None = "", name: str = "calculator", first: int = 0) -> Message:
    """A message with a call for each of `arguments`: a mapping, or the text that the client wrote."""
    calls = [
        {
            "id": f"call{first + place:05}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for place, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: Any, place: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{place:05}", "content": text}


def once(arguments: Any, **fields: Any) -> Sequence[Message]:
    """A question, a call with these arguments and its result, and the next question."""
    return user("6*7?"), calling(arguments, **fields), result("42"), said("42."), user("And 7*8?")


CONVERSATIONS: Mapping[str, Sequence[Message]] = {
    "no call": (user("6*7?"), said("42"), user("And 7*8?")),
    "system prompt": (system("Be brief."), user("6*7?")),
    "one call": once({"expression": "6*7"}),
    "one call, whose result is the end": once({"expression": "6*7"})[:3],
    "content null": once({"expression": "6*7"}, content=None),
    "content beside the call": once({"expression": "6*7"}, content="Let me see."),
    "system prompt and call": (system("It is 12:04."), *once({"expression": "6*7"})),
    "two calls one after the other": (
        user("?"), calling({"expression": "6*7"}), result("42"), calling({"expression": "7*8"}, first=1),
        result("56", 1), user("Sure?"),
    ),
    "two calls, cut off after the second result": (
        user("?"), calling({"expression": "6*7"}), result("42"), calling({"expression": "7*8"}, first=1),
        result("56", 1),
    ),
    "parallel calls": (
        user("?"), calling({"expression": "6*7"}, {"expression": "7*8"}), result("42"), result("56", 1), user("Sum?"),
    ),
    "three parallel calls of one tool": (
        user("?"), calling({"expression": "1*1"}, {"expression": "2*2"}, {"expression": "3*3"}), result("1"),
        result("4", 1), result("9", 2),
    ),
    "trimmed to a call": (user("..."), *once({"expression": "6*7"})[1:]),
    "few-shot": (
        *once({"expression": "1+1"})[:4], user("2+2?"), calling({"expression": "2+2"}, first=5), result("4", 5),
        said("4."), user("6*7?"),
    ),
    "no arguments": once({}),
    "empty text of arguments": once(""),
    "space in arguments": once('{ "expression" :\n "6*7" }'),
    "nested arguments": once({"expression": {"left": [6, {"of": None}], "right": {"deep": {"er": True}}}}),
    "list of mixed values": once({"expression": [1, "2", 3.5, None, False, {"a": []}]}),
    "unicode": once({"expression": "6×7 – «größer» 数 🙂"}),
    "escaped unicode": once('{"expression": "\\u00d7\\ud83d\\ude42"}'),
    "markup": once({"expression": "<b>\"6\" & '7'</b>\n\tend\\"}),
    "integers": once({"expression": 42, "a": -7, "b": 0}),
    "integer of 64 bits": once({"expression": 2**63 - 1}),
    "large integers": once({"expression": LARGE, "a": [-LARGE, {"b": 2**64}]}),
    "floats": once({"expression": 1.5, "a": 1e22, "b": -0.25, "c": 1e-9}),
    "booleans and null": once({"expression": True, "a": False, "b": None}),
    "many arguments in an order of their own": once('{"z": 1, "a": 2, "m": {"y": 1, "b": 2}}'),
    "text in JSON's form": once({"expression": '{"expression": "6*7"}'}),
    "unknown tool": once({"city": "Zürich"}, name="weather"),
    "result is empty": (user("?"), calling({"expression": "6*7"}), result(""), user("And?")),
    "result is JSON": (user("?"), calling({"expression": "6*7"}), result('{"value": 42, "unit": null}'), user("And?")),
    "result is a list of strings": (
        user("?"), calling({"expression": "6*7"}), result([{"type": "text", "text": "42"}]), user("And?"),
    ),
    "result has lines": (user("?"), calling({"expression": "6*7"}), result("a\n\nb \n"), user("And?")),
    "edited answer": (user("6*7?"), said("The answer, as edited, is 42."), user("And 7*8?")),
    "user's words after a result": (user("?"), calling({"expression": "6*7"}), result("42"), user("Explain.")),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return BUILT_IN[request.param]


@pytest.fixture(scope="module")
def tokenizer(family: Family, tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("tokenizer"), family)


def is_json_alone(family: Family) -> bool:
    return any(BUILT_IN[name] == family for name in JSON_ALONE)


def as_rendered(message: Message, *, as_json: bool) -> Message:
    """A client's message as transformers takes it."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    changed: dict[str, Any] = {**message, "content": content or ""}
    if "tool_calls" in message:
        changed["tool_calls"] = []
        for call in message["tool_calls"]:
            written = call["function"]["arguments"] or "{}"
            arguments = written if as_json else json.loads(written)
            changed["tool_calls"].append({**call, "function": {**call["function"], "arguments": arguments}})
    return changed


def expected(tokenizer: HfTokenizer, conversation: Sequence[Message], tools: Any, *, as_json: bool) -> str | None:
    """What transformers makes of a conversation; None if the template refuses it."""
    history = [as_rendered(message, as_json=as_json) for message in conversation]
    try:
        rendered: str = tokenizer.backend.apply_chat_template(
            history, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None
    return rendered


async def prompted(tokenizer: HfTokenizer, body: Mapping[str, Any], protocol: CallProtocol = chat) -> str | None:
    """The text of the prompt that a request makes; None if it is refused."""
    model = Model(tokenizer, ["-"])
    session = make_session(model, tool_parser="auto", max_prompt_tokens=100_000)
    try:
        await serve(session, protocol.parse({"model": "m", **body}, {}))
    except CallRefused:
        return None
    return tokenizer.decode(model.requests[0].prompt_ids.tolist(), special=True)


def test_the_model_reads_what_transformers_makes_of_a_foreign_history(family: Family, tokenizer: HfTokenizer) -> None:
    as_json = is_json_alone(family)
    found, right = {}, {}
    for name, conversation in CONVERSATIONS.items():
        for tools in ([TOOL], None):
            body = {"messages": list(conversation), **({"tools": tools} if tools else {})}
            found[name, bool(tools)] = run(partial(prompted, tokenizer, body))
            right[name, bool(tools)] = expected(tokenizer, conversation, tools, as_json=as_json)
    assert found == right
    assert sum(text is not None for text in right.values()) >= 50
    assert any(str(LARGE) in text for text in right.values() if text)


def test_all_protocols_give_a_foreign_call_to_the_template_alike(family: Family, tokenizer: HfTokenizer) -> None:
    arguments = {"expression": "6*7", "n": LARGE}
    written = json.dumps(arguments, separators=(",", ":"))
    call = calling(written)["tool_calls"][0]
    bodies: list[tuple[CallProtocol, dict[str, Any]]] = [
        (chat, {"messages": [user("6*7?"), calling(written), result("42")]}),
        (
            messages,
            {
                "max_tokens": 99,
                "messages": [
                    user("6*7?"),
                    said([{"type": "tool_use", "id": call["id"], "name": "calculator", "input": arguments}]),  # type: ignore[arg-type]
                    user([{"type": "tool_result", "tool_use_id": call["id"], "content": "42"}]),
                ],
            },
        ),
        (
            responses,
            {
                "input": [
                    user("6*7?"),
                    {"type": "function_call", "call_id": call["id"], "name": "calculator", "arguments": written},
                    {"type": "function_call_output", "call_id": call["id"], "output": "42"},
                ]
            },
        ),
    ]
    history = [as_rendered(message, as_json=is_json_alone(family)) for message in bodies[0][1]["messages"]]
    right = tokenizer.backend.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    for protocol, body in bodies:
        assert run(partial(prompted, tokenizer, body, protocol)) == right


@pytest.mark.parametrize(
    "arguments", ['{"n": 12345678901234567890124, "x": [1.0, 1.10]}', '{"n": 1234567890123456789}']
)
def test_a_call_is_recognised_with_all_of_its_digits_or_as_javascript_rounds_it(
    arguments: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = family_tokenizer(tmp_path_factory.mktemp("tokenizer"), BUILT_IN["Qwen3"])
    said_ = '<tool_call>\n{"name": "calculator", "arguments": %s}\n</tool_call>' % arguments  # noqa: UP031
    in_javascript = {
        '{"n": 12345678901234567890124, "x": [1.0, 1.10]}': '{"n":1.2345678901234568e+22,"x":[1,1.1]}',
        '{"n": 1234567890123456789}': '{"n":1234567890123456800}',
    }[arguments]
    edited = arguments.replace("4", "5")
    opening = user("?")
    for sent, is_known in ((arguments, True), (in_javascript, True), (edited, False)):
        model = Model(tokenizer, [tokenizer.encode(said_ + "<|im_end|>"), [5]])
        session = make_session(model, tool_parser="auto", max_prompt_tokens=100_000)
        body: dict[str, Any] = {"model": "m", "tools": [TOOL], "messages": [opening]}
        answer = run(partial(serve, session, chat.parse(body, {})))
        assert answer.calls[0].raw_arguments == arguments
        body["messages"] = [opening, calling(sent), result("42")]
        run(partial(serve, session, chat.parse(body, {})))
        assert (session.tree.answered.nodes[1].parent is not None) is is_known


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3-Coder", "GLM-4.5", "Llama 3.2", "DeepSeek-V3.1", "GPT-OSS"])
def test_a_program_with_a_clock_in_its_system_prompt_is_served_to_its_end(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = BUILT_IN[name]
    tokenizer = family_tokenizer(tmp_path_factory.mktemp("tokenizer"), family)
    values = ("6*7", "7*8", "8*9")
    words = [family.calling(value) + (family.call_end or family.end) for value in values]
    model = Model(tokenizer, [tokenizer.encode(text) for text in (*words, family.saying("72") + family.end)])
    session = make_session(model, tool_parser="auto", max_prompt_tokens=100_000)
    messages_: list[Message] = [user("?")]
    for minute, value in enumerate(values):
        body = {"model": "m", "tools": [TOOL], "messages": [system(f"It is 12:0{minute}."), *messages_]}
        answer = run(partial(serve, session, chat.parse(body, {})))
        assert answer.calls[0].arguments == {"expression": value}
        messages_ += [calling(answer.calls[0].raw_arguments, first=minute), result("42", minute)]
    messages_ = [system("It is 12:09."), *messages_]
    body = {"model": "m", "tools": [TOOL], "messages": messages_}
    assert run(partial(serve, session, chat.parse(body, {}))).content.strip() == "72"
    text = tokenizer.decode(model.requests[-1].prompt_ids.tolist(), special=True)
    history = [as_rendered(message, as_json=is_json_alone(family)) for message in messages_]
    assert text == tokenizer.backend.apply_chat_template(
        history, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
