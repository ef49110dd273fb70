"""An MCP server in a process, without MCP's SDK, which takes two processor seconds to import.

`plain_mcp_server.py [FILE]` speaks over its standard streams, and its tools behave as those of `mcp_server.py`. It
imports nothing of rollq. If there is a FILE, the server has the tools that it names.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
CALLS = count(1)

Message = dict[str, Any]


class Tool(NamedTuple):
    """A tool, its description, and the properties in the schema of its arguments."""

    function: Callable[..., object]
    description: str
    properties: Message
    required: tuple[str, ...] = ()

    @property
    def schema(self) -> Message:
        """The schema of its arguments."""
        return {"type": "object", "properties": self.properties, "required": self.required}


def text(words: object) -> Message:
    return {"type": "text", "text": str(words)}


def product(expression: str) -> int:
    left, right = map(int, expression.split("*"))
    return left * right


TOOLS = {
    "calculator": Tool(product, "Work out a product.", {"expression": {"type": "string"}}, ("expression",)),
    "count": Tool(lambda by=1: next(CALLS), "Count the calls.", {"by": {"type": "integer"}}),
    "variables": Tool(lambda: " ".join(sorted(os.environ)), "Name the variables of the process.", {}),
    "picture": Tool(
        lambda: [text("a cat"), {"type": "image", "data": "AAAA", "mimeType": "image/png"}], "Show a picture.", {}
    ),
    "process": Tool(os.getpid, "The process of the server.", {}),
    "hang": Tool(lambda: time.sleep(3600), "Block the server.", {}),
    "die": Tool(lambda: os._exit(3), "End the server.", {}),
}
BROKEN = {"broken": Tool(os.getpid, "Has a schema that is none.", {"a": {"type": "objekt"}})}
"""Tools that a server has only if its FILE names them."""


def answer(method: str, params: Message, tools: Mapping[str, Tool]) -> Message:
    """The answer to a request, as the SDK gives it."""
    match method:
        case "initialize":
            about = {"name": "desk", "version": "1"}
            given = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
            return {"result": given}
        case "tools/list":
            listed = [
                {"name": name, "description": tool.description, "inputSchema": tool.schema}
                for name, tool in tools.items()
            ]
            return {"result": {"tools": listed}}
        case "tools/call" if params["name"] not in tools:
            return {"error": {"code": INVALID_PARAMS, "message": f"Unknown tool: {params['name']}"}}
        case "tools/call":
            try:
                found = tools[params["name"]].function(**params["arguments"])
            except ValueError:
                said = [text(f"Error executing tool {params['name']}")]
                return {"result": {"content": said, "isError": True}}
            return {"result": {"content": found if isinstance(found, list) else [text(found)]}}
    return {"error": {"code": METHOD_NOT_FOUND, "message": f"Method not found: {method}"}}


def main() -> None:
    """Answer requests, one a line, until the input ends."""
    every = {**TOOLS, **BROKEN}
    names = Path(sys.argv[1]).read_text().split() if sys.argv[1:] else TOOLS
    tools = {name: every[name] for name in names}
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            given = answer(message["method"], message.get("params") or {}, tools)
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **given}), flush=True)


if __name__ == "__main__":
    main()
