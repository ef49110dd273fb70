"""Shared fixtures: real servers, and a run per test.

Every pytest-xdist worker starts one server for its whole session and empties it after each test, so no test sees the
keys of another. `--server redis` starts the system's Redis instead of the embedded Valkey, `--server cluster` a cluster
of six. A test that kills, fills or reconfigures a server takes `fresh_server`.
"""

import gc
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

# Before anything imports torch: as many test processes as cores, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import redis

from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.run_store import RunStore
from rollq.buffer.store.servers import Cluster
from support.any_server import AnyServer
from support.demo_folder import prepare_once
from support.forks import start_forks
from support.processor_budget import ProcessorBudget

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer


TESTS = Path(__file__).parent
MANY_PROCESSES = {"deploy", "docs", "e2e", "test_benchmarks.py"}
"""Folders and files whose tests start many processes, which work on while a test waits."""
BUDGET = pytest.StashKey[ProcessorBudget]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server", choices=["valkey", "redis", "cluster"], default="valkey", help="the server that tests share"
    )
    parser.addoption(
        "--processor-budget", type=float, metavar="SECONDS", help="fail a run that takes more processor seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start to count processor seconds, in the process that starts the others."""
    limit_s: float | None = config.getoption("--processor-budget")
    if limit_s is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[BUDGET] = ProcessorBudget(limit_s)
        config.stash[BUDGET].start()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that exceeds its budget. By now, all test processes have ended."""
    budget = session.config.stash.get(BUDGET, None)
    if budget is not None:
        budget.finish()
        if budget.is_exceeded and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the use of the budget."""
    budget = config.stash.get(BUDGET, None)
    if budget is not None:
        terminalreporter.section("processor budget")
        terminalreporter.line(f"{'EXCEEDED: ' if budget.is_exceeded else ''}{budget}")


def pytest_collection(session: pytest.Session) -> None:
    """Collect no garbage while test modules are imported: there is none, and looking for it takes a third longer."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Never look at imported modules again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that must pass on every kind of server, and put the long ones first.

    One test process then runs most of them, one after the other, beside the short ones of the other processes.
    """
    items.sort(key=lambda item: MANY_PROCESSES.isdisjoint(item.path.relative_to(TESTS).parts))
    for item in items:
        if "any_server" in getattr(item, "fixturenames", ()):
            item.add_marker("any_server")


@pytest.fixture(scope="session")
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """The server, or the cluster, that all tests of this process share."""
    kind = request.config.getoption("--server")
    folder = tmp_path_factory.mktemp(kind)
    binary = request.getfixturevalue("redis_binary") if kind == "redis" else None
    started = EmbeddedCluster(folder) if kind == "cluster" else EmbeddedServer(folder, binary=binary)
    with started as server:
        yield server


@pytest.fixture
def any_server(shared_server: AnyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnyServer]:
    """The shared server, for tests that CI also runs on the system's Redis and on a cluster.

    It is empty at the start of each test. On a cluster, `Buffer.client` reaches all of it: tests look into it by that.
    """
    if isinstance(shared_server, EmbeddedServer):
        yield shared_server
        _empty(shared_server)
        return
    with redis.RedisCluster.from_url(shared_server.nodes[0].url) as client:
        one_server = vars(RunStore)["client"].fget

        def client_of(store: RunStore) -> Any:
            return client if isinstance(store.servers, Cluster) else one_server(store)

        monkeypatch.setattr(RunStore, "client", property(client_of))
        yield shared_server
    for node in shared_server.nodes:
        _empty(node)


@pytest.fixture
def server(shared_server: AnyServer) -> Iterator[EmbeddedServer]:
    """The shared server, for tests that need a plain one."""
    assert isinstance(shared_server, EmbeddedServer)
    yield shared_server
    _empty(shared_server)


def _empty(server: EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client, suppress(redis.exceptions.ReadOnlyError):
        client.flushall()


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


@pytest.fixture(params=["valkey", "redis"])
def fresh_server_of_each_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server for one test alone, the embedded Valkey and the system's Redis."""
    binary = request.getfixturevalue("redis_binary") if request.param == "redis" else None
    with EmbeddedServer(tmp_path / "server", binary=binary) as server:
        yield server


@pytest.fixture(params=["redis", "valkey"])
def tls_binary(request: pytest.FixtureRequest) -> Path:
    """A server program with TLS: the system's Redis, and a Valkey built with TLS if one is installed."""
    if request.param == "redis":
        redis_server: Path = request.getfixturevalue("redis_binary")
        return redis_server
    found = shutil.which("valkey-server")
    if found is None:
        pytest.skip("no valkey-server on the PATH; the embedded one has no TLS")
    return Path(found)


@pytest.fixture(scope="session")
def forks() -> None:
    """Start the process that `fork` copies, which takes seconds, before the run of a test has begun."""
    start_forks()


@pytest.fixture(scope="session")
def prepared_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `rollq demo --prepare` makes it, with an almost untrained model. Copy it to change it."""
    own = tmp_path_factory.getbasetemp()
    return prepare_once(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


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


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser Chromium. In CI it must be there."""
    found = shutil.which("chromium")
    return Path(found) if found else missing("no chromium on the PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """Prometheus, beside its `promtool`. In CI it must be there."""
    found = shutil.which("prometheus")
    return Path(found) if found else missing("no prometheus on the PATH (Debian: apt-get install prometheus)")


@pytest.fixture(scope="session")
def cxx_compiler() -> Path:
    """A C++ compiler, which torch calls as `c++`. In CI it must be there."""
    found = shutil.which("c++")
    return Path(found) if found else missing("no c++ on the PATH (Debian: apt-get install g++)")


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
