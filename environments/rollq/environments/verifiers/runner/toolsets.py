"""Starts toolsets, a few at a time per processor, and notices failed starts at once. verifiers starts a program for
each toolset of each episode. The program imports verifiers, which takes 3 to 10 s of processor time. verifiers gives up
after 180 s, which many concurrent starts all exceed, and does not check whether the program still runs.
"""

import ast
import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verifiers.v1.env import Env
from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch
from verifiers.v1.mcp.server import ServerBase
from verifiers.v1.runtimes import Runtime

LOOK_S = 0.2
STARTS = 4
"""Concurrent starts per processor; most of a start is waiting."""
GUARD = 'if __name__ == "__main__":\n    {name}.run()'
"""The end of a toolset's module, since verifiers starts it as a program."""

_start = launch.serve_in_runtime
_places = asyncio.Semaphore(STARTS * (os.cpu_count() or 1))


def watch_starts() -> None:
    """Make verifiers start toolsets with `started`."""
    launch.serve_in_runtime = started


async def started(server: ServerBase[Any, Any], runtime: Runtime, **how: Any) -> int:
    """Wait until a toolset is up, and return its port. Raises `ToolsetError` as soon as its process has ended."""
    async with _places:
        before = set(_processes(runtime))
        starting = asyncio.create_task(_start(server, runtime, **how))
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=LOOK_S)
                ended = [process for process in _processes(runtime) if process not in before and _has_ended(process)]
                if ended and not starting.done():
                    raise ToolsetError(await _problem(server, runtime, ended[0]))
            port: int = starting.result()
            return port
        finally:
            starting.cancel()


def _processes(runtime: Runtime) -> list[asyncio.subprocess.Process]:
    """The background processes of a local runtime."""
    return list(getattr(runtime, "_background", ()))


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None


async def _problem(server: ServerBase[Any, Any], runtime: Runtime, process: asyncio.subprocess.Process) -> str:
    name = type(server).__name__
    said = await launch.log_tail(runtime, f"vf_tool_{server.server_name}.log")
    hint = f"; its module must end with:\n{GUARD.format(name=name)}" if not (process.returncode or said) else ""
    return f"toolset {name} ended with exit code {process.returncode} before it was up{hint}: {said}"


def toolsets_of(env: Env[Any]) -> Iterator[Any]:
    """The toolsets that verifiers will start."""
    task = type(env.taskset).task_type()
    made = [*env.taskset.toolsets(env.config.taskset), *task.toolsets(env.config.taskset.task)]
    return (toolset for toolset in made if not toolset.config.url)


def problem_of(toolset: Any) -> str:
    """Why a toolset cannot start; empty if no fault is found."""
    name, module = type(toolset).__name__, type(toolset).__module__
    found = find_spec(module)
    if found is None or not found.origin:
        return f"toolset {name}: {module} cannot be imported by name: install its package"
    if not _runs(Path(found.origin).read_text(), name):
        return f"toolset {name}: {found.origin} must end with:\n{GUARD.format(name=name)}"
    return ""


def _runs(source: str, name: str) -> bool:
    """Whether a module runs the class of this name when run as a program."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    tested = [block for block in blocks if "__main__" in ast.unparse(block.test)]
    return any(f"{name}.run()" in ast.unparse(block) for block in tested)
