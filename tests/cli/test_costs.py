"""What an idle role costs: the packages that it imports, its connections to the server, and its memory."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rq.command import send_shutdown_command

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.waiting import PATIENCE_S, wait_while_alive

HEAVY = ("torch", "vllm", "transformers", "tokenizers", "rollq.buffer.tracing.exporting")
COMMAND = (
    "import atexit, sys; from rollq.cli.main import main\n"
    f"atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules]))\n"
    "main({arguments})"
)
SETTINGS = """
run = "costs"
[tasks.main]
prompts = "prompts.jsonl"
batch_groups = 2
[worker]
engine = "simulated"
grace_s = 0
"""
LOOKS = {"produce": "cmdstat_llen", "work": "cmdstat_blmove"}
"""A command of RQ's that an idle role repeats."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server without other connections; the settings `rollq.toml` are beside it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with EmbeddedServer(tmp_path / "redis") as server:
        (tmp_path / "rollq.toml").write_text(f'{SETTINGS}[redis]\nbuffer_url = "{server.url}"\n')
        yield server


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """`rollq` in a process that ends with a line of the heavy packages that it has imported."""
    code = COMMAND.format(arguments=[*arguments, str(folder / "rollq.toml")])
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log)


@contextmanager
def idle(server: EmbeddedServer, folder: Path, role: str) -> "Iterator[tuple[Buffer, subprocess.Popen[bytes]]]":
    """A role with nothing to do, after some seconds of it, and a buffer with one connection."""
    with Buffer.connect(server.url, "costs") as buffer, start(folder, role) as process:

        def registered() -> bool:
            return buffer.client.exists(buffer.keys.info) == 1 and "main" in buffer.tasks()

        def looked(times: int) -> bool:
            statistics = buffer.client.info("commandstats").get(LOOKS[role], {"calls": 0})
            return bool(statistics["calls"] >= times)

        def wait(happened: Callable[[], bool]) -> None:
            wait_while_alive(happened, {role: process}, lambda _: (folder / f"{role}.log").read_text())

        try:
            wait(registered)
            if role == "work":  # without weights, it would not even ask for tickets
                buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="", digest="d")
            wait(lambda: looked(4))
            yield buffer, process
        finally:
            process.terminate()


def connections(buffer: Buffer) -> int:
    """The connections to the server, except for that of `buffer`."""
    return len(buffer.client.client_list()) - 1


@pytest.mark.parametrize("role", LOOKS)
def test_an_idle_role_has_three_connections_and_imports_nothing_heavy(
    role: str, server: EmbeddedServer, tmp_path: Path
) -> None:
    with idle(server, tmp_path, role) as (buffer, process):
        assert connections(buffer) == 3, buffer.client.client_list()
        used = psutil.Process(process.pid).memory_info().rss
        process.terminate()
        assert process.communicate()[0] == b"[]\n"
    assert used < 120e6


def test_a_worker_gets_the_commands_of_rq_on_the_subscription_that_they_share(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    with idle(server, tmp_path, "work") as (buffer, process):
        (name,) = buffer.workers()
        send_shutdown_command(buffer.client, name)
        assert process.wait(PATIENCE_S) == 0


def test_status_has_two_connections_and_imports_nothing_heavy(server: EmbeddedServer, tmp_path: Path) -> None:
    with idle(server, tmp_path, "produce"), Buffer.connect(server.url, "costs") as buffer:
        before = buffer.client.info("stats")["total_connections_received"]
        with start(tmp_path, "status") as status:
            assert status.communicate()[0].endswith(b"[]\n")
        made = buffer.client.info("stats")["total_connections_received"] - before
    assert (status.returncode, made) == (0, 3), "the queue's server is asked once whether it is in a cluster"


def test_the_check_sees_a_heavy_package() -> None:
    code = COMMAND.format(arguments=["--version"]).replace("import atexit", "import tokenizers, atexit")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.endswith(b"['tokenizers']\n")
