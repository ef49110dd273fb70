"""Shared fixtures: real servers, and a namespace per test.

Every pytest-xdist worker has one server for its whole session; tests share it, each under a run name of its own.
A test that kills, fills or reconfigures a server takes `fresh_server`.
"""

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

# Before anything imports torch: as many test processes as cores, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rollq.buffer.store.server import EmbeddedServer

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The embedded Valkey that this process's tests share."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server_url(server: EmbeddedServer) -> str:
    """URL of the shared server."""
    return server.url


@pytest.fixture
def run_name() -> str:
    """A run that no other test knows."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def buffer(server_url: str, run_name: str) -> "Iterator[Buffer]":
    """A buffer of a run of its own on the shared server; the run is not created yet."""
    from rollq.buffer.buffer import Buffer

    with Buffer.connect(server_url, run_name) as buffer:
        yield buffer


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server for one test alone, which may kill, stop and restart it."""
    with EmbeddedServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(scope="session")
def openssl() -> Path:
    """The `openssl` command. In CI it must be there."""
    found = shutil.which("openssl")
    return Path(found) if found else missing("no openssl on the PATH")


@pytest.fixture(scope="session")
def redis_cli() -> Path:
    """The `redis-cli` command. In CI it must be there."""
    found = shutil.which("redis-cli")
    return Path(found) if found else missing("no redis-cli on the PATH (Debian: apt-get install redis-tools)")


def missing(what: str) -> NoReturn:
    """Fail in CI, where everything is installed, and skip on a machine that has only Python."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def redis_binary() -> Path:
    """The system's `redis-server`, version 7.0 or newer. In CI it must be there."""
    found = shutil.which("redis-server")
    if found:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"v=(\d+)", version)
        if match and int(match[1]) >= 7:
            return Path(found)
    missing("no redis-server >= 7.0 on the PATH (Debian: apt-get install redis-server)")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path) -> Iterator[EmbeddedServer]:
    """The system's Redis, shared like `server`."""
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), binary=redis_binary) as server:
        yield server


@pytest.fixture(params=["valkey", "redis"])
def any_server(request: pytest.FixtureRequest) -> EmbeddedServer:
    """Runs the test twice: on the embedded Valkey and on the system's Redis."""
    server: EmbeddedServer = request.getfixturevalue("server" if request.param == "valkey" else "redis_server")
    return server
