"""Connections without a token to servers of tests, and processes that may open only a few files."""

import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

FEW_FILES = 128
HALF_HEADERS = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
SLOW_BODY = b"POST /s/wrong/reward HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"
IDLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
EVENTS = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def with_few_files(command: Sequence[str], files: int = FEW_FILES) -> list[str]:
    """A command whose process may open only so many files."""
    return ["/bin/sh", "-c", f'ulimit -n {files} && exec "$0" "$@"', *command]


@contextmanager
def strangers(url: str, count: int, sends: bytes, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Open connections, which send these bytes and then nothing, and read nothing."""
    address = urlsplit(url)
    assert count < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(connect((str(address.hostname), address.port or 0), source))
            opened[-1].sendall(sends)
        yield opened
    finally:
        for one in opened:
            one.close()


def connect(address: tuple[str, int], source: str) -> socket.socket:
    """A connection that comes from an address of loopback."""
    return socket.create_connection(address, timeout=60, source_address=(source, 0))


def is_open(one: socket.socket) -> bool:
    """Whether the server has left a connection open, as far as it shows by now."""
    one.setblocking(False)
    try:
        while received := one.recv(1 << 16):
            assert received
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
