"""Arguments without quotes, and the values that the schema of the tool makes of them."""

from typing import Any

import pytest

from rollq.workers.agents.formats.typed_arguments import typed_call
from rollq.workers.agents.tool_calls import Malformed, ToolCall


def value_of(written: str, schema: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    call = typed_call("f", [("a", written)], (tool,), "text", 0)
    assert isinstance(call, ToolCall)
    return call.arguments["a"]


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        (" x ", {"type": "string"}, " x "),
        ("42", {"enum": ["42", "43"]}, "42"),
        ("null", {"type": ["string", "null"]}, None),
        ("nil", {"type": ["string", "null"]}, "nil"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("42", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "42"),
        ("42", {"type": "integer"}, 42),
        (" 42\n", {"type": "integer"}, 42),
        ("forty-two", {"type": "integer"}, "forty-two"),
        ("4.5", {"type": "number"}, 4.5),
        ("NaN", {"type": "number"}, "NaN"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ('["a", 1]', {"type": "array"}, ["a", 1]),
        ('{"a": {"b": null}}', {"type": "object"}, {"a": {"b": None}}),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("42", {}, 42),
        ("True", {}, "True"),
        ("Paris", None, "Paris"),
        ("42", {"$ref": "#/$defs/Number"}, 42),
    ],
)
def test_a_value_has_the_type_of_its_schema(written: str, schema: Any, value: Any) -> None:
    found = value_of(written, schema)
    assert (found, type(found)) == (value, type(value))


def test_without_a_schema_a_value_is_json_if_it_can_be() -> None:
    call = typed_call("f", [("a", "42"), ("b", "x"), ("c", "[1]")], (), "text", 0)
    assert call == ToolCall("f", {"a": 42, "b": "x", "c": [1]})
    assert isinstance(call, ToolCall)
    assert call.raw_arguments == '{"a":42,"b":"x","c":[1]}'


def test_a_tool_without_parameters_has_no_schemas() -> None:
    tools = ({"type": "search"}, {"type": "function", "function": {"name": "f", "parameters": None}})
    assert typed_call("f", [("a", "42")], tools, "text", 0) == ToolCall("f", {"a": 42})


def test_a_call_that_cannot_be_json_is_malformed() -> None:
    assert isinstance(typed_call("f", [("a", "\ud800")], (), "text", 0), Malformed)
    assert isinstance(typed_call("", [], (), "text", 0), Malformed)
