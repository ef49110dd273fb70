"""Connections without a token at the servers of `rollq dashboard` and `rollq metrics`, whose processes may open few
files: a viewer is served beside them."""

import http.client
import json
import socket
from urllib.parse import urlsplit

import pytest

from rollq.buffer.buffer import Buffer
from support.buffer_run import World
from support.dashboard import TOKEN, serving
from support.strangers import EVENTS, FEW_FILES, HALF_HEADERS, IDLE, connect, is_open, strangers
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("forks")

COUNT = 4 * FEW_FILES
SHARE = FEW_FILES // 8
"""Connections of one address."""
GARBAGE = b"\x00\x01\r\n\r\n"


def viewer(url: str, path: str, source: str) -> bytes:
    """The answer to a request on a connection of its own."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        str(address.hostname), address.port, timeout=PATIENCE_S, source_address=(source, 0)
    )
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    body = answer.read()
    connection.close()
    return body


def next_event(stream: socket.socket) -> bytes:
    """What the page gets next."""
    stream.settimeout(PATIENCE_S)
    return stream.recv(1 << 16)


@pytest.mark.long
@pytest.mark.parametrize("sends", [HALF_HEADERS, EVENTS, IDLE, GARBAGE, b""])
@pytest.mark.parametrize("name", ["dashboard", "metrics"])
def test_a_viewer_is_served_beside_connections_without_a_token(
    buffer: Buffer, server_url: str, name: str, sends: bytes
) -> None:
    World(buffer).start(math={})
    path = "/api/status" if name == "dashboard" else "/metrics"
    with (
        serving("--url", server_url, "--run", buffer.run, name=name, files=FEW_FILES) as url,
        strangers(url, COUNT, sends) as many,
    ):
        assert b"math" in viewer(url, path, "127.0.0.2")
        assert b"math" in viewer(url, path, "127.0.0.1")
        wait_until(lambda: sum(map(is_open, many)) <= SHARE)


def test_a_page_keeps_its_events_beside_connections_of_another_address(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={})
    with serving("--url", server_url, "--run", buffer.run, token=TOKEN, files=FEW_FILES) as url:
        address = urlsplit(url)
        with connect((str(address.hostname), address.port or 0), "127.0.0.2") as page:
            page.sendall(EVENTS)
            assert b"200 OK" in next_event(page)
            with strangers(url, COUNT, EVENTS):
                assert changes(url) == 200
                assert next_event(page)
                assert next_event(page)


def changes(url: str) -> int:
    """Ask with the token for a change that is not made."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
    body = json.dumps({"order": "pause", "kind": "run", "dry_run": True})
    connection.request("POST", "/api/changes", body, {"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    connection.close()
    return answer.status
