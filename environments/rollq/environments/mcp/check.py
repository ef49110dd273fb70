"""Checks an MCP server without a model: it answers, lists the same tools twice, serves several sessions at once, and
leaves nothing behind."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from rollq.buffer.common.ending import cancel
from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import Finding, Level
from rollq.workers.agents.mcp.server import McpServer
from rollq.workers.agents.tools import ToolSettings

AT_ONCE: Final = 16
LONGEST_S: Final = 120.0
"""How long all sessions may take to open and close."""
GONE_S: Final = 2.0
"""How long the system may take to show that a process or a connection is gone."""
LOOK_S: Final = 0.05


def check_server(name: str, settings: ToolSettings) -> Iterator[Finding]:
    """A server's faults, and its tools."""
    processes, sockets = _children(), _sockets()
    try:
        server = McpServer(name, settings)
    except ConfigError as error:
        yield Finding(Level.ERROR, str(error))
        return
    yield Finding(Level.NOTE, f"{len(server.listed.tools)} tools: {', '.join(server.listed.tools)}")
    for tool in server.listed.tools.values():
        if not tool.definition["function"]["description"]:
            yield Finding(Level.WARNING, f"tool {tool.name!r} has no description, so the model must guess its purpose")
    with ThreadPoolExecutor(1) as thread:  # the caller may or may not have an event loop
        yield from thread.submit(asyncio.run, _sessions(server)).result()
    for what, now in (("processes", lambda: _children() - processes), ("connections", lambda: _sockets() - sockets)):
        if left := _after_a_while(now):
            yield Finding(Level.ERROR, f"{len(left)} {what} remain after the sessions were closed")


def _finding(problems: Sequence[BaseException], took_s: float) -> Finding:
    """A finding about how the sessions opened."""
    if not problems:
        return Finding(Level.NOTE, f"{AT_ONCE} sessions opened in {took_s:.1f} s")
    reason = str(problems[0]) or f"they took longer than {LONGEST_S:g} s"
    return Finding(Level.ERROR, f"{len(problems)} of {AT_ONCE} concurrent sessions failed: {reason}")


async def _sessions(server: McpServer) -> list[Finding]:
    """Open several sessions at once and close them. Each session lists the tools again."""
    started_s = monotonic()
    opening = [asyncio.ensure_future(server.open()) for _ in range(AT_ONCE)]
    await asyncio.wait(opening, timeout=LONGEST_S)
    await cancel(opening)
    opened = await asyncio.gather(*opening, return_exceptions=True)
    took_s = monotonic() - started_s
    closing = [asyncio.ensure_future(session.close()) for session in opened if not isinstance(session, BaseException)]
    closing.append(asyncio.ensure_future(server.close()))
    _, late_ones = await asyncio.wait(closing, timeout=LONGEST_S)
    problems = [error for error in opened if isinstance(error, BaseException)]
    findings = [_finding(problems, took_s)]
    if late_ones:
        findings.append(Finding(Level.ERROR, f"{len(late_ones)} sessions did not close within {LONGEST_S:g} s"))
    return findings


def _children() -> set[int]:
    """The children of this process; empty where the system does not list them."""
    texts = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    return {int(pid) for text in texts for pid in text.split()}


def _sockets() -> set[str]:
    """The open sockets of this process; empty where the system does not list them."""
    links = set()
    for file in Path("/proc/self/fd").glob("*"):
        try:
            links.add(os.readlink(file))
        except OSError:  # it has been closed
            continue
    return {link for link in links if link.startswith("socket:")}


def _after_a_while(left: Callable[[], set[int] | set[str]]) -> set[int] | set[str]:
    deadline_s = monotonic() + GONE_S
    while (found := left()) and monotonic() < deadline_s:
        sleep(LOOK_S)
    return found
