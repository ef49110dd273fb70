"""JSON schemas of an environment's actions, and templates that fit these schemas. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from rollq.buffer.common.mappings import filled, without
from rollq.environments.openenv.templates import Action, NoSuchField

METADATA: Final = "metadata"


def fields_of(schema: Mapping[str, Any]) -> dict[str, bool]:
    """An action's fields, each mapped to whether it is required. Metadata does not count."""
    required = schema.get("required", ())
    return {name: name in required for name in schema.get("properties", {}) if name != METADATA}


def calls_tools(schema: Mapping[str, Any]) -> bool:
    """Whether actions are calls of MCP tools."""
    return "tool_name" in fields_of(schema)


def only_field(schema: Mapping[str, Any]) -> Action:
    """The action with the model's text in its only required field, or else its only field. Raises `NoSuchField` if
    there are several.
    """
    if calls_tools(schema):
        raise NoSuchField("actions are MCP tool calls: set tools = true")
    fields = fields_of(schema)
    required = list(filled(fields))
    name = required[0] if len(required) == 1 else next(iter(fields), "") if len(fields) == 1 else ""
    if not name:
        raise NoSuchField(
            f"an action has the fields {', '.join(fields) or '(none)'}: set action to a table with these fields"
        )
    return {name: "{text}"}


def misfits(schema: Mapping[str, Any], action: Action) -> list[str]:
    """Why a template does not fit this schema; empty if it does, or if only the model's JSON decides."""
    if not isinstance(action, Mapping):
        return []
    fields = fields_of(schema)
    unknown = {} if schema.get("additionalProperties", False) else without(action, {*fields, METADATA})
    return [f"actions have no field {name!r}" for name in unknown] + [
        f"actions need the field {name!r}" for name in without(filled(fields), action)
    ]
