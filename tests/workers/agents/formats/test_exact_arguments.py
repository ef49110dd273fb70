"""Arguments of calls: as the model wrote them, with all digits, and never `{}` in place of what was misspelt."""

import json

import pytest

from rollq.workers.agents.chat_formats import BUILT_IN
from rollq.workers.agents.tool_calls import Malformed, ToolCall

TOOLS = (
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    },
)
LARGE = 12345678901234567890124
WRITTEN = f'{{ "n": {LARGE},"m" : [1.10, 1e5, {{"deep":  -{LARGE}}}], "t": "\\u00d7 \\" }} ]" }}'
AS_JSON = {
    "hermes": '<tool_call>\n{"id": [1], "arguments": ARGUMENTS , "name": "f"}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]f[ARGS]ARGUMENTS",
    "mistral, a list": '[TOOL_CALLS] [{"name": "g", "arguments": {}} , {"name":"f","arguments":ARGUMENTS}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>ARGUMENTS<|call|>",
}
AS_TEXT = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
}


def calls_in(name: str, text: str) -> tuple[ToolCall | Malformed, ...]:
    return BUILT_IN[name.partition(",")[0]].parser(text, TOOLS, "").calls


@pytest.mark.parametrize("name", AS_JSON)
def test_arguments_stay_as_the_model_wrote_them(name: str) -> None:
    call = calls_in(name, AS_JSON[name].replace("ARGUMENTS", WRITTEN))[-1]
    assert isinstance(call, ToolCall)
    assert call.raw_arguments == WRITTEN
    assert call.arguments == json.loads(WRITTEN)
    assert call.arguments["n"] == LARGE


@pytest.mark.parametrize("name", AS_TEXT)
@pytest.mark.parametrize("value", [str(LARGE), str(-LARGE), str(2**64), f"[{LARGE}, 1.10]", "1" * 400])
def test_values_without_quotes_keep_their_digits(name: str, value: str) -> None:
    (call,) = calls_in(name, AS_TEXT[name].replace("VALUE", value))
    assert isinstance(call, ToolCall)
    assert call.raw_arguments == f'{{"n":{value}}}'
    assert call.arguments == {"n": json.loads(value)}


@pytest.mark.parametrize("name", AS_JSON)
@pytest.mark.parametrize("arguments", ['{"n": NaN}', '{"n": 1e999}', '{"n": ' + "9" * 5000 + "}", "[1]", "{'n': 1}"])
def test_arguments_that_no_client_can_read_are_malformed(name: str, arguments: str) -> None:
    calls = calls_in(name, AS_JSON[name].replace("ARGUMENTS", arguments))
    assert not calls or isinstance(calls[-1], Malformed)


@pytest.mark.parametrize("name", AS_JSON)
def test_arguments_that_are_too_deep_to_be_stored_are_malformed(name: str) -> None:
    calls = calls_in(name, AS_JSON[name].replace("ARGUMENTS", '{"n": ' + "[" * 250 + "]" * 250 + "}"))
    assert isinstance(calls[-1], Malformed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "args": {"n": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "n": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "Arguments": {"n": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"n": 1}}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "parameters": {"n": 1}}]'),
        ("mistral", '[TOOL_CALLS]f(n=1){"n": 1}'),
        ("llama3_json", '<|python_tag|>{"name": "f", "args": {"n": 1}}'),
        ("llama3_json", "<|python_tag|>f(n=1)"),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'),
        ("qwen3_coder", '<tool_call><function=f(n=1)></function></tool_call>'),
        ("qwen3_coder", '<tool_call><function=f>{"n": 1}</function></tool_call>'),
        ("qwen3_coder", "<tool_call><function=f><param=n>1</param></function></tool_call>"),
        ("qwen3_coder", '<tool_call><function name="f"><parameter=n>1</parameter></function></tool_call>'),
        ("glm45", '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'),
        ("glm45", "<tool_call>f(n=1)</tool_call>"),
        ("glm45", '<tool_call>f\n{"n": 1}</tool_call>'),
        ("glm45", "<tool_call>f\n<parameter=n>1</parameter></tool_call>"),
        ("glm45", "<tool_call>f\nn: 1</tool_call>"),
        ("deepseek_v31", AS_JSON["deepseek_v31"].replace("ARGUMENTS", "")),
        ("deepseek_v31", AS_JSON["deepseek_v31"].replace("ARGUMENTS", "n=1")),
        ("deepseek_v3", AS_JSON["deepseek_v3"].replace("f\n```json\nARGUMENTS\n```", 'f(n=1)\n```json\n{}\n```')),
        ("harmony", AS_JSON["harmony"].replace("ARGUMENTS", "n=1")),
    ],
)  # fmt: skip
def test_a_call_in_another_spelling_is_malformed(name: str, text: str) -> None:
    (call,) = calls_in(name, text)
    assert isinstance(call, Malformed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"type": "function", "name": "f"}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "id": "123456789"}]'),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>"),
        ("glm45", "<tool_call>f</tool_call>"),
    ],
)
def test_a_call_that_names_no_arguments_has_none(name: str, text: str) -> None:
    assert calls_in(name, text) == (ToolCall("f", {}),)
