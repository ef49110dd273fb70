"""The world that most tests of the buffer play in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from support.any_server import AnyServer
from support.buffer_run import World, payloads_in


@pytest.fixture
def world(any_server: AnyServer, run_name: str, tmp_path: Path) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name, payloads=payloads_in(tmp_path / "payloads")) as buffer:
        yield World(buffer)
