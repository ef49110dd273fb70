import subprocess
import sys
from pathlib import Path

import psutil

from support.waiting import PATIENCE_S

BUSY = Path(__file__).with_name("busy.py")
COMMAND = """
import psutil, signal, sys
print(*(child.pid for child in psutil.Process().children()), flush=True)
signal.pause()
"""


def test_a_command_runs_beside_four_busy_processes_that_end_with_it() -> None:
    words = [sys.executable, str(BUSY), sys.executable, "-c", COMMAND]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        busy = [psutil.Process(int(pid)) for pid in command.stdout.readline().split()]
        assert [process.is_running() for process in busy] == [True] * 4
        command.kill()
    _, alive = psutil.wait_procs(busy, timeout=PATIENCE_S)
    assert alive == []
