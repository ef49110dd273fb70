"""What chat templates take, and calls in the prompts of the other agent loops."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.loops import prompt_tokens
from rollq.workers.agents.template_forms import TemplateForms, for_template, tools_for_template
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.tokenizers.byte import ByteTokenizer
from support.chat_engine import PLAIN, Model, chat_tokenizer, converse
from support.chat_families import BUILT_IN, TOOL, family_tokenizer

SHOWS = PLAIN.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }} ARGUMENTS{% endfor %}",
)
AS_MAPPING = SHOWS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
AS_JSON = SHOWS.replace("ARGUMENTS", "{{ 'with ' + call.function.arguments }}")
AS_PYTHON = SHOWS.replace("ARGUMENTS", "{{ call.function.arguments }}")
DESCRIBED = AS_MAPPING.replace("{{ tool.function.name }}", "{{ tool.function.name + tool.function.description }}")
LARGE = 12345678901234567890124


def turn(arguments: Any) -> dict[str, Any]:
    made = {"id": "call00000", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


@pytest.mark.parametrize(
    ("template", "forms"),
    [
        (PLAIN, TemplateForms()),
        (AS_MAPPING, TemplateForms()),
        (AS_JSON, TemplateForms(json_arguments=True)),
        (AS_PYTHON, TemplateForms(json_arguments=True)),
        (DESCRIBED, TemplateForms(descriptions=True)),
    ],
    ids=["no calls", "mapping", "JSON", "would be Python", "descriptions"],
)
def test_a_template_shows_what_it_takes(template: str, forms: TemplateForms, tmp_path: Path) -> None:
    assert TemplateForms.of(chat_tokenizer(tmp_path, template)) == forms


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ({"a": 1}, {"a": 1}),
        (f'{{"a": {LARGE}}}', {"a": LARGE}),
        ("null", None),
        ("[1]", [1]),
        ("not JSON", "not JSON"),
        ('"a text"', '"a text"'),
        ("{'a': 1}", "{'a': 1}"),
    ],
)
def test_arguments_become_a_mapping_if_they_are_one(given: Any, taken: Any) -> None:
    (message,) = for_template(ByteTokenizer(), [turn(given)])
    assert message["tool_calls"][0]["function"]["arguments"] == taken


@pytest.mark.parametrize(
    ("given", "taken"),
    [('{"a":1}', '{"a":1}'), ({"a": [1, "é"]}, '{"a": [1, "é"]}'), ({"a": LARGE}, f'{{"a": {LARGE}}}')],
)
def test_arguments_become_json_where_the_template_takes_nothing_else(given: Any, taken: str, tmp_path: Path) -> None:
    (message,) = for_template(chat_tokenizer(tmp_path, AS_JSON), [turn(given)])
    assert message["tool_calls"][0]["function"]["arguments"] == taken


@pytest.mark.parametrize(
    "call", ["text", {"name": "f", "arguments": '{"a": 1}'}, {"name": "f"}, {"function": "f"}, None]
)
def test_calls_of_any_shape_are_the_templates_to_judge(call: Any) -> None:
    (message,) = for_template(ByteTokenizer(), [{"role": "assistant", "content": "", "tool_calls": [call]}])
    right = {"name": "f", "arguments": {"a": 1}} if isinstance(call, dict) and "arguments" in call else call
    assert message["tool_calls"] == [right]


def test_a_tool_without_a_description_gets_an_empty_one_only_where_the_template_needs_it(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    described = {"type": "function", "function": {"name": "f", "parameters": {}, "description": ""}}
    assert tools_for_template(chat_tokenizer(tmp_path / "a", DESCRIBED), [tool, TOOL]) == (described, TOOL)
    assert tools_for_template(chat_tokenizer(tmp_path / "b", AS_MAPPING), [tool, TOOL]) == (tool, TOOL)


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3-Coder", "Llama 3.2", "DeepSeek-V3", "GPT-OSS", "GLM-4.5"])
@pytest.mark.parametrize("as_json", [False, True])
def test_calls_in_a_prompt_reach_the_model_in_every_loop(name: str, as_json: bool, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, BUILT_IN[name])
    arguments: Any = f'{{"expression": "6*7", "n": {LARGE}}}' if as_json else {"expression": "6*7", "n": LARGE}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "42"}
    history = ({"role": "user", "content": "?"}, turn(arguments), result, {"role": "user", "content": "7*8?"})
    right = f'{{"expression": "6*7", "n": {LARGE}}}' if name == "DeepSeek-V3" else {"expression": "6*7", "n": LARGE}
    rendered = (history[0], turn(right), *history[2:])
    prompt = Prompt(history)
    for loop, tools in (("single_turn", None), ("tools", [TOOL]), ("environment", [TOOL])):
        options: dict[str, Any] = {} if loop == "single_turn" else {"tool_parser": "auto"}
        if loop == "tools":
            options["tools"] = {"calculator": {}}
        elif loop == "environment":
            options["environment"] = "support.chat_families.Interview"
        model = Model(tokenizer, ["56", "56"])
        converse(make_loop(loop, options), model, prompt, max_tokens=9000, max_prompt_tokens=9000)
        wanted = tokenizer.backend.apply_chat_template(
            list(rendered),
            tools=[TOOL] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
        text = tokenizer.decode(model.requests[0].prompt_ids.tolist(), special=True)
        if loop == "tools":  # its calculator has another description
            assert text.partition("7*8?")[2] == wanted.partition("7*8?")[2]
            assert text[-900:].count(str(LARGE)) == 1
        else:
            assert text == wanted
    assert tokenizer.decode(prompt_tokens(prompt, tokenizer).tolist(), special=True).count(str(LARGE)) == 1
