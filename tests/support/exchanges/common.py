"""One turn of a table, and the tools and calls that the tables share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollq.workers.agents.tool_calls import ToolCall

TOOLS: Sequence[Mapping[str, Any]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in {
        "weather": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "search": {
            "query": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filters": {"type": "object"},
            "exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "score": {"type": "number"},
            "note": {"type": ["string", "null"]},
        },
        "now": {},
    }.items()
)
MALFORMED = "malformed"


@dataclass(frozen=True)
class Exchange:
    """One turn that continues `prompt`. Each of the `calls` is a call, or the word MALFORMED."""

    text: str
    calls: tuple[ToolCall | str, ...] = ()
    content: str = ""
    reasoning: str | None = None
    prompt: str = ""


def weather(**arguments: Any) -> ToolCall:
    """A call of the weather tool."""
    return ToolCall("weather", arguments)


PARIS, ROME = weather(city="Paris", days=2), weather(city="Rome")
NOW = ToolCall("now", {})
