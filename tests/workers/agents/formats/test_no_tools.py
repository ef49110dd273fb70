"""Turns of a model that was given no tools: nothing is a call, and no text is lost."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollq.workers.agents.chat_formats import BUILT_IN, make_format
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.turns import Turn
from rollq.workers.gateway.protocols import chat, messages, responses
from support.chat_engine import Model, call, chat_tokenizer
from support.chat_families import BUILT_IN as FAMILIES
from support.chat_families import THOUGHT, TOOL, Family, family_tokenizer
from support.gateway_calls import make_session, run, serve

TEXTS = {
    "hermes": 'Write <tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call> to call it.',
    "qwen3_coder": "This:\n<tool_call>\n<function=ls>\n<parameter=path>\n.\n</parameter>\n</function>\n</tool_call>",
    "qwen3_xml": "<function=ls></function>",
    "llama3_json": '<|python_tag|>{"name": "Alice", "parameters": {"age": 3}}; {"name": "Bob", "parameters": {}}',
    "mistral": 'Use this: [TOOL_CALLS] [{"name": "ls", "arguments": {"path": "."}}]  ',
    "deepseek_v3": "<｜tool▁calls▁begin｜>broken",
    "deepseek_v31": "Use: <｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>ls<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": "Use:\n<tool_call>ls\n<arg_key>path</arg_key>\n<arg_value>.</arg_value>\n</tool_call>",
    "glm47": "<tool_call>ls",
    "harmony": '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"path": "."}<|call|>',
    "openai": ' to=functions.ls<|channel|>commentary json<|message|>{"path": "."}',
}


def parse(name: str, text: str, tools: Sequence[Message] | None) -> Turn:
    tokenizer: Any = None
    return asyncio.run(make_format(name).parse(tokenizer, text, [], tools, ""))


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_tools_a_text_in_the_form_of_a_call_is_content(name: str) -> None:
    assert parse(name, TEXTS[name], ()) == Turn(TEXTS[name], TEXTS[name])


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("tools", [None, (TOOL,)])
def test_with_tools_or_where_they_are_not_known_it_is_a_call(name: str, tools: Any) -> None:
    assert parse(name, TEXTS[name], tools).calls


@pytest.mark.parametrize("family", [each for each in FAMILIES.values() if each.thinks])
def test_thoughts_are_found_without_tools(family: Family, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, family)
    name = family.parsers.get("tool_parser", "hermes")
    text = family.thinking(family.calling("6*7"))
    turn = asyncio.run(make_format(name).parse(tokenizer, text, [], (), family.prompt))
    assert not turn.calls
    assert (turn.reasoning or "").strip() == THOUGHT
    assert "calculator" in turn.content
    assert "6*7" in turn.content


def test_a_message_to_a_tool_among_others_is_content_as_it_is_written() -> None:
    said = "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{}"
    turn = parse(
        "harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{said}<|start|>assistant"
        "<|channel|>final<|message|>Done.", (),
    )  # fmt: skip
    assert (turn.reasoning, turn.content, turn.calls) == ("Hm.", f"{said}\nDone.", ())


@pytest.mark.parametrize("wants", ["no tools", "none"])
@pytest.mark.parametrize("protocol", [chat, messages, responses])
def test_a_program_without_tools_gets_all_of_the_text(protocol: Any, wants: str, tmp_path: Path) -> None:
    text = f"Write {call('calculator', expression='6*7')} to call it."
    body: dict[str, Any] = {"model": "m", "max_tokens": 500}
    question = [{"role": "user", "content": "How?"}]
    body |= {"input": question} if protocol is responses else {"messages": question}
    if wants == "none":
        tool = TOOL["function"]
        body["tool_choice"] = {"type": "none"} if protocol is messages else "none"
        body["tools"] = {
            chat: [TOOL],
            messages: [{"name": "calculator", "input_schema": tool["parameters"]}],  # type: ignore[index]
            responses: [{"type": "function", **tool}],  # type: ignore[dict-item]
        }[protocol]
    session = make_session(Model(chat_tokenizer(tmp_path), [text]))
    answer = run(lambda: serve(session, protocol.parse(body, {})))
    assert (answer.content, answer.calls) == (text, ())


def test_a_program_that_reads_calls_out_of_the_text_itself_continues_its_segment(tmp_path: Path) -> None:
    text = call("calculator", expression="6*7")
    session = make_session(Model(chat_tokenizer(tmp_path), [text, "It is 42."]))
    history = [{"role": "user", "content": "6*7?"}]

    async def use() -> None:
        await serve(session, chat.parse({"model": "m", "messages": history}, {}))
        result = {"role": "user", "content": "<tool_response>42</tool_response>"}
        grown = [*history, {"role": "assistant", "content": text}, result]
        await serve(session, chat.parse({"model": "m", "messages": grown}, {}))

    run(use)
    sample = session.sample(extra={})
    assert len(sample.segments) == 1
    assert [fact["left_out"] for fact in sample.extra["calls"]] == [None, None]
