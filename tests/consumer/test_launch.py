"""A rank ends with its launcher, also with one that was gone before the rank had started."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_until

LAUNCHER = """
import os, sys
from rollq.cli import ranks
rank = ranks._start(0, ["no-such-file.toml"], os.environ)
if sys.argv[1] == "dies":
    os.kill(rank.pid, {stop})  # it has not come to its first line
    print(rank.pid, flush=True)
    os._exit(0)
print(rank.wait(), flush=True)
"""


def launch(how: str, errors: Path) -> int:
    """Start a launcher of a rank, which writes to `errors`; returns what the launcher prints."""
    code, output = LAUNCHER.format(stop=int(signal.SIGSTOP)), errors.with_name("output")
    with errors.open("wb") as errors_file, output.open("wb") as output_file:
        subprocess.run([sys.executable, "-c", code, how], stdout=output_file, stderr=errors_file, check=True)
    return int(output.read_text())


def test_a_rank_with_a_launcher_runs_its_command(tmp_path: Path) -> None:
    assert launch("stays", tmp_path / "errors") != 0
    assert "no-such-file.toml" in (tmp_path / "errors").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_rank_whose_launcher_is_gone_at_its_start_ends_before_it_does_anything(tmp_path: Path) -> None:
    rank = psutil.Process(launch("dies", tmp_path / "errors"))
    rank.resume()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    assert (tmp_path / "errors").read_text() == ""
