"""Answers that follow a JSON schema, in all protocols."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollq.workers.engines.limits import check_supported
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.gateway.calls import CallProtocol, CallRefused
from rollq.workers.gateway.protocols import chat, messages, responses
from support.chat_engine import Model, chat_tokenizer
from support.chat_families import TOOL
from support.gateway_calls import make_session, run, serve

SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
USER = [{"role": "user", "content": "6*7?"}]
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
ASKING: list[tuple[CallProtocol, dict[str, Any], Any]] = [
    (chat, {"messages": USER, "response_format": NAMED}, SCHEMA),
    (chat, {"messages": USER, "response_format": {"type": "json_object"}}, {"type": "object"}),
    (responses, {"input": USER, "text": {"format": FLAT}}, SCHEMA),
    (responses, {"input": USER, "text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    (messages, {"messages": USER, "max_tokens": 50, "output_config": {"format": FLAT}}, SCHEMA),
    (messages, {"messages": USER, "max_tokens": 50, "output_format": FLAT}, SCHEMA),
]
ALL = pytest.mark.parametrize(("protocol", "body", "schema"), ASKING)


def tools_of(protocol: CallProtocol) -> list[Any]:
    function: Any = TOOL["function"]
    if protocol is messages:
        return [{"name": "calculator", "input_schema": function["parameters"]}]
    return [TOOL] if protocol is chat else [{"type": "function", **function}]


@ALL
def test_an_answer_is_guided_by_the_schema_that_was_asked_for(
    protocol: CallProtocol, body: dict[str, Any], schema: Any, tmp_path: Path
) -> None:
    model = Model(chat_tokenizer(tmp_path), ['{"answer": 42}', "42"])
    session = make_session(model)
    call = protocol.parse({"model": "m", **body}, {})
    assert call.ignored == ()
    assert run(partial(serve, session, call)).content == '{"answer": 42}'
    plain = {name: value for name, value in body.items() if name in ("messages", "input", "max_tokens")}
    run(partial(serve, session, protocol.parse({"model": "m", **plain}, {})))
    assert [request.sampling.guided_json for request in model.requests] == [schema, None]
    sample = session.sample(extra={})
    assert sample.extra["guided_calls"] == 1
    assert [fact["left_out"] for fact in sample.extra["calls"]] == [None, None]  # they do not ask for the same


@ALL
def test_a_schema_that_would_keep_the_model_from_its_tools_is_refused(
    protocol: CallProtocol, body: dict[str, Any], schema: Any
) -> None:
    asked = {"model": "m", **body, "tools": tools_of(protocol)}
    if schema is SCHEMA:
        with pytest.raises(CallRefused, match="would keep the model from calling its tools"):
            protocol.parse(asked, {})
    else:  # without a schema it has no effect
        call = protocol.parse(asked, {})
        assert (call.schema, len(call.ignored)) == (None, 1)
    none = {"type": "none"} if protocol is messages else "none"
    assert protocol.parse({**asked, "tool_choice": none}, {}).schema == schema


def test_an_engine_without_guides_refuses_in_a_sentence(tmp_path: Path) -> None:
    class Plain(Model):
        async def generate(self, request: Request) -> Completion:
            check_supported(request.sampling, "transformers")
            return await super().generate(request)

    session = make_session(Plain(chat_tokenizer(tmp_path), ["42"]))
    with pytest.raises(CallRefused, match="engine 'transformers' does not support guided_json") as refused:
        run(partial(serve, session, chat.parse({"model": "m", **ASKING[0][1]}, {})))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("protocol", "body", "problem"),
    [
        (chat, {"messages": USER, "response_format": {"type": "regex"}}, r"response_format.type must be text"),
        (chat, {"messages": USER, "response_format": "json"}, r"response_format must be an object"),
        (chat, {"messages": USER, "response_format": {"type": "json_schema"}}, r"response_format.json_schema must be"),
        (responses, {"input": USER, "text": {"format": {"type": "json_schema"}}}, r"text.format.schema must be"),
        (responses, {"input": USER, "text": "json"}, r"text must be an object"),
        (messages, {"messages": USER, "output_config": {"format": {"type": "xml"}}}, r"output_config.format.type must"),
    ],
)
def test_a_form_that_no_answer_has_is_refused(protocol: CallProtocol, body: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefused, match=problem):
        protocol.parse({"model": "m", **body}, {})


def test_an_answer_may_be_a_text() -> None:
    call = chat.parse({"model": "m", "messages": USER, "response_format": {"type": "text"}}, {})
    other = responses.parse({"model": "m", "input": USER, "text": {"format": {"type": "text"}, "verbosity": "low"}}, {})
    assert (call.schema, call.ignored, other.schema, other.ignored) == (None, (), None, ("text",))
