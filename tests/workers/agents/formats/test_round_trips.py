"""Turns that the real chat template of a family renders are parsed into what was rendered, and rendered back."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.workers.agents.chat_formats import BUILT_IN as FORMATS
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.agents.turns import Turn, answer, forms
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_families import BUILT_IN, Family, family_tokenizer
from support.exchanges import TOOLS

FAMILIES = {
    name: family
    for name, family in BUILT_IN.items()
    if name not in ("Qwen3, found", "GPT-OSS, recipient in the channel")
}
ONE_CALL = ("Llama 3.1", "Llama 3.2", "GPT-OSS")
"""Their templates render one call in a turn."""
NO_LISTS = ("Qwen3-Coder",)
"""Its template writes lists as Python does."""
USER: Message = {"role": "user", "content": "Hi"}

texts = st.text(st.sampled_from("aé六😀 \n\t\"'\\{}[]()<>:,;=/_|0"), max_size=20)
words = st.text(st.sampled_from("aé六😀 \"'\\{}[]()<>:,;=/_|0"), max_size=20).map(str.strip)
numbers = st.integers(-(2**53), 2**53)
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | texts
ARGUMENTS: Mapping[str, st.SearchStrategy[Any]] = {
    "query": texts,
    "exact": st.booleans(),
    "limit": st.none() | numbers,
    "score": st.floats(allow_nan=False, allow_infinity=False),
    "filters": st.dictionaries(words, scalars | st.lists(scalars, max_size=3), max_size=3),
}
WITH_LISTS = {**ARGUMENTS, "tags": st.lists(texts, max_size=3)}


@cache
def tokenizer_of(name: str) -> HfTokenizer:
    with TemporaryDirectory() as folder:
        return family_tokenizer(Path(folder), FAMILIES[name])


def made_call(name: str, arguments: Mapping[str, Any], number: int) -> ToolCall:
    """A call with an id; the conversation would keep its JSON as the model wrote it."""
    return ToolCall(name, arguments, f"{number:09}", json.dumps(arguments, ensure_ascii=False))


@st.composite
def turns(draw: st.DrawFn, name: str) -> Turn:
    family = FAMILIES[name]
    arguments = ARGUMENTS if name in NO_LISTS else WITH_LISTS
    drawn = draw(
        st.lists(
            st.sampled_from(["search", "now"]).flatmap(
                lambda tool: st.tuples(
                    st.just(tool), st.fixed_dictionaries({}, optional=dict(arguments) if tool == "search" else {})
                )
            ),
            min_size=1,
            max_size=1 if name in ONE_CALL else 3,
        )
    )
    calls = tuple(made_call(tool, values, number) for number, (tool, values) in enumerate(drawn))
    content = draw(st.just("") | words.map("Remark: {}.".format))
    reasoning = draw(words.map("Thought: {}.".format)) if family.thinks else None
    return Turn("", content, reasoning, calls)


def rendered(tokenizer: HfTokenizer, family: Family, turn: Turn, form: Message) -> tuple[str, str] | None:
    """The prompt and the text of a turn with calls, as the template writes it; None if it refuses this form."""
    results = [answer(turn, call, "42", verbatim=False) for call in turn.calls]
    try:
        whole = tokenizer.render([USER, form, *results], TOOLS)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None
    prompt = tokenizer.render([USER], TOOLS)
    if not whole.startswith(prompt):
        prompt = prompt.removesuffix("<think>\n")  # that of DeepSeek-V3 drops thoughts before a call
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].partition(family.call_end or family.end)[0]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_a_rendered_turn_is_parsed_and_rendered_back(name: str, data: st.DataObject) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    turn = data.draw(turns(name))
    parser = FORMATS[family.parsers.get("tool_parser", "hermes")].parser
    shown = [form for form in forms(turn, tokenizer) if "tool_calls" in form]
    written = [each for form in shown if (each := rendered(tokenizer, family, turn, form))]
    prompt, text = written[0]
    parsed = parser(text, TOOLS, prompt)
    assert parsed.calls == turn.calls
    assert (parsed.reasoning or "").strip() == (turn.reasoning if turn.reasoning and turn.reasoning in text else "")
    assert parsed.content.strip() == (turn.content if turn.content in text else "")
    again = [rendered(tokenizer, family, parsed, form) for form in forms(parsed, tokenizer)]
    assert (prompt, text) in again
