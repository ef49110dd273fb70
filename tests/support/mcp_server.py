"""A real MCP server in a process: `mcp_server.py stdio [FILE]`, or `mcp_server.py http PORT [FILE]`.

It imports nothing of rollq. If there is a FILE, the server has the tools that it names.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import ImageContent

COUNTS: Counter[str] = Counter()
server = MCPServer("desk", log_level="CRITICAL")


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    left, right = expression.split("*" if "*" in expression else "+")
    return str(int(left) * int(right) if "*" in expression else int(left) + int(right))


def count(context: Context, by: int = 1) -> int:
    """Count the calls of this session."""
    session = (context.headers or {}).get("mcp-session-id", "")
    COUNTS[session] += by
    return COUNTS[session]


def picture() -> list[str | ImageContent]:
    """Show a picture."""
    return ["a cat", ImageContent(type="image", data="AAAA", mime_type="image/png")]


def variables() -> str:
    """Name the variables of the server's process, and its headers."""
    return " ".join(sorted(os.environ))


def header(name: str, context: Context) -> str:
    """Give a header of the request."""
    return (context.headers or {}).get(name, "")


async def hang() -> str:
    """Block the whole server."""
    time.sleep(3600)
    return ""


async def wait() -> str:
    """Never answer, and block nobody."""
    await asyncio.Event().wait()
    return ""


async def die() -> str:
    """End the server."""
    os._exit(3)


def process() -> int:
    """The process of the server."""
    return os.getpid()


TOOLS = {each.__name__: each for each in (calculator, count, picture, variables, header, hang, wait, die, process)}


def main() -> None:
    """Serve until the input ends, or the process does."""
    kind, *rest = sys.argv[1:]
    port = int(rest.pop(0)) if kind == "http" else 0
    names = Path(rest[0]).read_text().split() if rest else list(TOOLS)
    for name in names:
        server.add_tool(TOOLS[name])
    if kind == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=port)


if __name__ == "__main__":
    main()
