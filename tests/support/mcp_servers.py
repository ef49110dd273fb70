"""MCP servers of tests: their commands, one that listens, and what is left of them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rollq.buffer.common.ports import free_port
from support.waiting import wait_while_alive

PROGRAM = Path(__file__).with_name("mcp_server.py")
PLAIN = Path(__file__).with_name("plain_mcp_server.py")


def command(*arguments: object) -> str:
    """The command of a server with MCP's SDK. `arguments` are a file that names its tools."""
    return " ".join([sys.executable, str(PROGRAM), "stdio", *map(str, arguments)])


def plain_command(*arguments: object) -> str:
    """The command of a server without the SDK, which starts at once. `arguments` are as those of `command`."""
    return " ".join([sys.executable, "-I", "-S", str(PLAIN), *map(str, arguments)])


@contextmanager
def listening(port: int | None = None, *arguments: object) -> Iterator[str]:
    """A server that listens, until the end; yields its URL."""
    port = port or free_port("127.0.0.1")
    process = subprocess.Popen([sys.executable, str(PROGRAM), "http", str(port), *map(str, arguments)])
    try:
        wait_while_alive(lambda: _listens(port), {"server": process}, str)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def left() -> list[object]:
    """The processes of servers that this process has started, and its open connections to listening ones."""
    own = psutil.Process(os.getpid())
    lines = {child: _command_line(child) for child in own.children(recursive=True)}
    servers = {child: line[line.index(str(PROGRAM)) + 1 :] for child, line in lines.items() if str(PROGRAM) in line}
    ports = {int(line[1]) for line in servers.values() if line[0] == "http"}
    return [
        *(child for child, line in servers.items() if line[0] == "stdio"),
        *(child for child, line in lines.items() if str(PLAIN) in line),
        *(each for each in own.net_connections("tcp") if each.raddr and each.raddr.port in ports),
    ]


def _command_line(process: psutil.Process) -> list[str]:
    """The command of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
