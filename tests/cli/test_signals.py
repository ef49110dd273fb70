import subprocess
import sys

from support.waiting import PATIENCE_S

DROPPED = """
import os, signal, time
from rollq.cli.signals import interrupt_once

class Garbage:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass  # the interrupt is raised in here, where Python drops it

with interrupt_once():
    try:
        Garbage()
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_that_python_drops_comes_again() -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
