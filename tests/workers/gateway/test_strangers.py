"""Connections without a token at a gateway whose process may open few files: a session is served beside them."""

import resource
import socket
from pathlib import Path

import orjson
import pytest

from support.gateway_process import GatewayProcess, gateway_process
from support.strangers import FEW_FILES, HALF_HEADERS, IDLE, SLOW_BODY, connect, is_open, strangers
from support.waiting import wait_until

BODY = orjson.dumps({"model": "rollq", "messages": [{"role": "user", "content": "Hi"}]})
COUNT = 4 * FEW_FILES


def ask(given: GatewayProcess, one: socket.socket) -> bool:
    """Whether a call on a connection, which stays open, is answered."""
    head = f"POST /s/{given.token}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"
    one.sendall(head.encode() + BODY)
    received = b""
    while b"\r\n\r\n" not in received or b"Hello" not in received:
        if not (part := one.recv(1 << 16)):
            return False
        received += part
    return received.startswith(b"HTTP/1.1 200")


@pytest.mark.long
@pytest.mark.parametrize("sends", [HALF_HEADERS, SLOW_BODY, IDLE, b""])
def test_a_session_is_served_beside_connections_without_a_token(tmp_path: Path, sends: bytes) -> None:
    with gateway_process(tmp_path, files=FEW_FILES) as given:
        host, _, port = given.url.removeprefix("http://").partition(":")
        with connect((host, int(port)), "127.0.0.1") as old:
            assert ask(given, old)
            with strangers(given.url, COUNT, sends) as many:
                assert ask(given, old)
                for source in ("127.0.0.1", "127.0.0.2"):
                    with connect((host, int(port)), source) as new:
                        assert ask(given, new)
                wait_until(lambda: sum(map(is_open, many)) <= FEW_FILES // 8)
            assert ask(given, old)
        assert len(given.log.read_text().splitlines()) <= 2, given.log.read_text()


@pytest.mark.long
def test_a_process_without_files_accepts_again_when_it_has_some(tmp_path: Path) -> None:
    with gateway_process(tmp_path, files=FEW_FILES) as given:
        host, _, port = given.url.removeprefix("http://").partition(":")
        resource.prlimit(given.pid, resource.RLIMIT_NOFILE, (1, FEW_FILES))
        with connect((host, int(port)), "127.0.0.1") as one:
            wait_until(lambda: "could not be accepted" in given.log.read_text())
            resource.prlimit(given.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
            assert ask(given, one)
        assert len(given.log.read_text().splitlines()) == 1
