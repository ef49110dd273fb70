"""The world that most tests of the buffer play in."""

from collections.abc import Iterator

import pytest

from rollq.buffer.buffer import Buffer
from support.any_server import AnyServer
from support.buffer_run import World


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)
