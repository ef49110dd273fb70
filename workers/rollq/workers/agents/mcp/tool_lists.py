"""The tools that an MCP server lists: definitions for chat templates, and change detection."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollq.buffer.common.mappings import without
from rollq.buffer.errors import ConfigError
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import CallError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from mcp_types import Tool as ListedTool


@dataclass(frozen=True)
class ToolSchema:
    """One tool as its server describes it. `definition` has the form that chat templates take, and the server's schema,
    unchanged."""

    definition: Message

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        name: str = self.definition["function"]["name"]
        return name

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the tool's arguments."""
        schema: Mapping[str, Any] = self.definition["function"]["parameters"]
        return schema

    @cached_property
    def _validator(self) -> "Validator":
        from jsonschema.validators import validator_for
        from referencing import Registry

        return validator_for(self.schema)(self.schema, registry=Registry())

    def check_schema(self) -> None:
        """Raise `ConfigError` if the schema is invalid or has external references."""
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing.exceptions import Unresolvable

        try:
            validator_for(self.schema).check_schema(self.schema)
            list(self._validator.iter_errors({}))
        except (SchemaError, Unresolvable) as error:
            reason = error.message if isinstance(error, SchemaError) else error
            raise ConfigError(f"tool {self.name!r} has an invalid JSON schema: {reason}") from error

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise `CallError` if the model's arguments do not match the schema."""
        from jsonschema.exceptions import best_match

        error = best_match(self._validator.iter_errors(arguments))
        if error is not None:
            place = ".".join(str(part) for part in error.absolute_path)
            problem = f"{place}: {error.message}" if place else error.message
            raise CallError(f"wrong arguments for {self.name!r}: {problem}")


def _schemas(listed: "Sequence[ListedTool]") -> dict[str, ToolSchema]:
    """The listed tools' schemas by name. Raises `ConfigError` for two tools with the same name."""
    tools: dict[str, ToolSchema] = {}
    for tool in listed:
        if tool.name in tools:
            raise ConfigError(f"the server lists two tools {tool.name!r}")
        described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        tools[tool.name] = ToolSchema({"type": "function", "function": described})
    return tools


@dataclass(frozen=True, slots=True)
class ToolList:
    """One server's tools by name, in the server's order."""

    tools: Mapping[str, ToolSchema]

    @classmethod
    def of(cls, listed: "Sequence[ListedTool]", only: Sequence[str]) -> "ToolList":
        """The tools that a server has listed; if `only` is not empty, only the tools that `only` names.

        Raises `ConfigError` for a name that is not listed, for two tools with the same name, and for an invalid schema.
        """
        tools = _schemas(listed)
        for name in only:
            if name not in tools:
                raise ConfigError(f"only: the server has no tool {name!r}; it has {', '.join(tools) or 'none'}")
        kept = without(tools, tools.keys() - {*only}) if only else tools
        if not kept:
            raise ConfigError("the server has no tools")
        for tool_schema in kept.values():
            tool_schema.check_schema()
        return cls(kept)

    @property
    def digest(self) -> str:
        """A short digest of all names, descriptions and schemas; the order of tools and of keys does not matter."""
        text = json.dumps({name: tool.definition for name, tool in self.tools.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def changes(self, other: "ToolList") -> str:
        """A description of how `other` differs; empty if the lists are equal."""
        if self.digest == other.digest:
            return ""
        gone = sorted(self.tools.keys() - other.tools.keys())
        new = sorted(other.tools.keys() - self.tools.keys())
        both = sorted(self.tools.keys() & other.tools.keys())
        changed = [name for name in both if self.tools[name].definition != other.tools[name].definition]
        lists = {"gone": gone, "new": new, "changed": changed}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in lists.items() if names)
