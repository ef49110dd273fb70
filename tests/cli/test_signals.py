import signal
import subprocess
import sys

import pytest

from support.waiting import PATIENCE_S

DROPPED = """
import signal, time
from rollq.cli.signals import interrupt_once

class Garbage:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        for _ in range(1000):
            pass  # the interrupt is raised in here, where Python drops it

with interrupt_once():
    try:
        Garbage()
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
"""

MISSED = """
import os, signal, threading

kill = os.kill

def kill_this_thread(_pid, number):  # does not wake the main thread, like a signal just before its system call
    os.kill = kill
    signal.pthread_kill(threading.get_ident(), number)

os.kill = kill_this_thread
"""

HELD = """
import os, signal
from rollq.cli.signals import stop_on_signals

stop = stop_on_signals()
with stop._cond:  # as in the middle of stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait())
"""


def test_a_signal_in_the_middle_of_a_wait_for_it_ends_the_wait() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("after_s", ["0.01", "0.0"])  # 0: while the report of the first one is still handled
def test_an_interrupt_that_python_drops_comes_again(after_s: str) -> None:
    program = f"from rollq.cli import signals\nsignals.AGAIN_AFTER_S = {after_s}\n{DROPPED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_a_repeated_interrupt_that_does_not_end_a_system_call_is_sent_again() -> None:
    done = subprocess.run([sys.executable, "-c", MISSED + DROPPED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


FORWARDING = """
import subprocess, sys
from rollq.cli.signals import forward_signals
with subprocess.Popen([sys.executable, "-c", sys.argv[1]]) as child:
    with forward_signals([child]):
        print("ended by", child.wait(), flush=True)
"""


STUCK = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
print("up", flush=True)
while True:
    time.sleep(60)
"""


def test_the_second_signal_kills_a_process_that_does_not_end_at_the_first() -> None:
    with subprocess.Popen([sys.executable, "-c", FORWARDING, STUCK], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGINT)
        assert parent.stdout.readline() == "asked\n"
        parent.send_signal(signal.SIGINT)
        assert parent.stdout.readline() == "ended by -9\n"
