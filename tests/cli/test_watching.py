"""`rollq status --watch`: one screen in a terminal, repeated output elsewhere, and a clean end by Ctrl-C."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.cli.watching import COLOURS, picture
from rollq.monitor.status.diagnosis import State
from support.buffer_run import World
from support.run_statuses import run_status
from support.waiting import PATIENCE_S

ALTERNATE_SCREEN, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def command(buffer: Buffer, server_url: str) -> list[str]:
    World(buffer).start(math={})
    return [sys.executable, "-m", "rollq.cli.main", "status", "--watch", "--url", server_url, "--run", buffer.run]


def read_until(file: int, wanted: bytes, seen: bytes = b"") -> bytes:
    """Read from a terminal until it has shown something."""
    deadline_s = time.monotonic() + PATIENCE_S
    while wanted not in seen:
        assert time.monotonic() < deadline_s, seen
        if select.select([file], [], [], 1)[0]:
            seen += os.read(file, 65536)
    return seen


def test_a_terminal_is_drawn_again_until_ctrl_c(command: list[str], buffer: Buffer) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as watch:
        os.close(theirs)
        seen = read_until(ours, b"no worker is alive")
        assert ALTERNATE_SCREEN in seen
        buffer.report_worker("worker-1", {"state": "serving", "in_flight": 0})
        read_until(ours, b"worker-1")
        watch.send_signal(signal.SIGINT)
        end = read_until(ours, BACK)
        assert watch.wait(PATIENCE_S) == 0
        assert b"Traceback" not in end
    os.close(ours)


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_terminal_the_status_is_repeated(command: list[str], as_json: bool) -> None:
    with subprocess.Popen(command + ["--json"] * as_json, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        found = 0
        while found < 2:
            line = watch.stdout.readline()
            assert line, watch.stderr and watch.stderr.read()
            if as_json:
                assert orjson.loads(line)["diagnosis"]["state"] == "training"
            found += as_json or line.startswith(b"training: ")
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=PATIENCE_S)
        assert (watch.returncode, errors) == (0, b"")


def test_a_picture_is_cut_to_the_terminal_with_the_diagnosis_at_the_top() -> None:
    text = picture(run_status(), 80, 4)
    lines = text.plain.splitlines()
    assert len(lines) == 4
    assert re.match("training: the trainer has been training step 41", lines[0])
    assert "bold green" in {span.style for span in text.spans}


def test_each_state_has_a_colour() -> None:
    assert set(COLOURS) == set(State)
