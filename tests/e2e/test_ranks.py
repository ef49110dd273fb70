"""`rollq train --ranks 2` and torchrun, with real workers: they train, stop on a signal, and end when a rank dies."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.consumer.trainer.checkpoints import newest_checkpoint
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from support.forked_roles import role
from support.waiting import PATIENCE_S, wait_until

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rollq.consumer.launch")


@pytest.fixture
def folder(prepared_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run with a producer and a worker."""
    folder = shutil.copytree(prepared_demo, tmp_path / "demo")
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        for name in ("produce", "work"):
            roles.enter_context(role(folder, name, "rollq.toml"))
        yield folder


def steps(folder: Path) -> int:
    path = folder / "trainer" / METRICS_FILE
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@contextmanager
def trainer(folder: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A trainer that has trained two steps more than before."""
    before = steps(folder)
    with (folder / "train.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, *command, "rollq.toml"], cwd=folder, stdout=log, stderr=log)
        try:
            wait_until(
                lambda: steps(folder) >= before + 2 or process.poll() is not None,
                otherwise=lambda: (folder / "train.log").read_text(),
            )
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.mark.slow  # three starts of two ranks; tests/consumer/test_ranks.py has ranks that save and resume
def test_a_signal_leaves_a_checkpoint_a_dead_rank_ends_all_and_torchrun_continues(folder: Path) -> None:
    launcher = ("-m", "rollq.cli.main", "train", "--ranks", "2")
    with trainer(folder, *launcher) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, (folder / "train.log").read_text()
    saved = newest_checkpoint(folder / "trainer")
    assert saved is not None
    assert saved.step == steps(folder)
    with trainer(folder, *launcher) as process:
        started = (folder / "train.log").read_text().rpartition("started 2 ranks: processes ")[2].splitlines()[0]
        os.kill(int(started.split(", ")[1]), signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    assert "error: rank 1 was killed by signal 9" in (folder / "train.log").read_text()
    with trainer(folder, *TORCHRUN) as process:
        assert process.poll() is None, (folder / "train.log").read_text()
