"""Text that no model should write: a format neither raises for it nor takes longer than its length warrants.

A search that starts again at every mark takes minutes to hours for these texts, and the test ends at its time limit.
"""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.workers.agents.chat_formats import BUILT_IN
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from support.exchanges import EXCHANGES, TOOLS

pytestmark = pytest.mark.timeout(120)  # a second is enough
LENGTH = 1_000_000
COMMON = ("<think>", "</think>", "{", "[", '"', '{"', '{"a":', '"\\', "\\", "<", " ", "\n", "\ud800")
MARKS: Mapping[str, Sequence[str]] = {
    "hermes": ("<tool_call>", "</tool_call>", '<tool_call>{"name": "now"}</tool_call>', "<tool_call> "),
    "qwen3_coder": (
        "<tool_call>", "<tool_call>\n<function=", "<function=", "<function=now>", "<function=now></function>",
        "<parameter=", "<parameter=a>", "<parameter=a>\n", "</function>", "</function> ", "</tool_call>",
        "<tool_call>\n<function=now><parameter=a>",
    ),
    "glm45": (
        "<tool_call>", "<tool_call>now", "<arg_key>", "<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>",
        "</tool_call>", "<arg_value>", "<tool_call>now<arg_key>a</arg_key>",
    ),
    "llama3_json": (
        "<|python_tag|>", '{"name":', '{"name": "', '{"name": {', '{"type": "x"}', '{"name": "now", "parameters": {}}',
        "<|python_tag|>f.call(", 'f.call(a="', 'a="b", ', "{ ",
    ),
    "mistral": (
        "[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]", '[TOOL_CALLS]now[ARGS]{"', "[TOOL_CALLS][",
        '[TOOL_CALLS]now{"a": "\\"', "[TOOL_CALLS] ", "[CALL_ID]", "[THINK]", "[/THINK]", "[ARGS]",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
        "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```", "<｜tool▁calls▁end｜>",
    ),
    "harmony": (
        "<|start|>", "<|channel|>", "<|message|>", "<|start|>assistant", "<|channel|>analysis<|message|>", "<|end|>",
        "<|start|>assistant to=functions.now<|message|>", " to=", "<|channel|>commentary to=f<|message|>{",
    ),
}  # fmt: skip
"""Name of a format -> what it looks for."""
OPENINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=query>",
    "glm45": "<tool_call>search<arg_key>query</arg_key><arg_value>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]search[ARGS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n",
    "harmony": "<|channel|>commentary to=functions.search<|message|>",
}


def check(name: str, text: str, prompt: str = "") -> None:
    turn = BUILT_IN[name].parser(text, TOOLS, prompt)
    assert turn.text == text
    assert all(isinstance(call, ToolCall | Malformed) for call in turn.calls)


@pytest.mark.parametrize(("name", "mark"), [(name, mark) for name in MARKS for mark in (*MARKS[name], *COMMON)])
def test_a_mark_that_is_repeated_a_million_times(name: str, mark: str) -> None:
    repeated = mark * (LENGTH // len(mark))
    check(name, repeated)
    check(name, OPENINGS[name] + repeated)
    check(name, repeated, prompt="<think>")


@pytest.mark.parametrize("name", MARKS)
def test_a_long_mixture_of_marks(name: str) -> None:
    rng = random.Random(0)
    pieces = [*MARKS[name], *COMMON]
    check(name, "".join(rng.choices(pieces, k=LENGTH // 10)))


@pytest.mark.parametrize("name", MARKS)
@given(data=st.data())
@settings(deadline=None)
def test_no_text_is_too_strange(name: str, data: st.DataObject) -> None:
    whole = [exchange.text for exchange in EXCHANGES[name].values()]
    pieces = st.sampled_from([*MARKS[name], *COMMON, *whole]) | st.text(max_size=5)
    check(name, "".join(data.draw(st.lists(pieces))), data.draw(st.sampled_from(["", "<think>"])))


@pytest.mark.parametrize("name", MARKS)
def test_a_turn_cut_off_anywhere_makes_no_other_call(name: str) -> None:
    for exchange in EXCHANGES[name].values():
        whole = [call for call in exchange.calls if isinstance(call, ToolCall)]
        for length in range(len(exchange.text)):
            turn = BUILT_IN[name].parser(exchange.text[:length], TOOLS, exchange.prompt)
            assert list(turn.well_formed) == whole[: len(turn.well_formed)], exchange.text[:length]
