"""Runs one command, and ends it with all that it started: when it exits, when this process gets SIGTERM, and when the
process that started this one dies. Then it removes the command's folder as well, since nobody else would.

Run as a program, `launcher PARENT FOLDER MAX_FILE_BYTES COMMAND...`; imports only stdlib.

On Linux, descendants that leave the command's process group are ended too: orphans become children of this process.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from rollq.buffer.common.child_processes import adopt_orphans, die_with_parent

NOT_FOUND = 127
PARENT_DIED = signal.SIGHUP
"""Sent by the system, once the parent's thread has died that started this process; SIGTERM is sent by the worker. The
parent's id says nothing: it stays the same while another of its threads is dying."""
AWAITED = {signal.SIGTERM, PARENT_DIED, signal.SIGCHLD}


def main(parent: int, folder: str, max_file_bytes: int, command: list[str]) -> int:
    """Run the command; returns its exit code, or 128 and the number of the signal that ended it."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # a handler might run only after the next system call
    adopt_orphans()
    die_with_parent(PARENT_DIED, parent)
    if PARENT_DIED in signal.sigpending():
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    limit_files(max_file_bytes)
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=partial(prepare_command, os.getpid()))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    ended = wait_for(child)
    end_descendants(child.pid)
    if ended == -PARENT_DIED or PARENT_DIED in signal.sigpending():
        shutil.rmtree(folder, ignore_errors=True)
    return ended if ended >= 0 else 128 - ended


def wait_for(child: "subprocess.Popen[bytes]") -> int:
    """Wait until the command ends, or this process gets a signal; returns the exit code, or the signal as -number."""
    while (code := child.poll()) is None:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            return -number
    return code


def limit_files(most_bytes: int) -> None:
    """Let no file become larger that this process or the command writes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def prepare_command(launcher: int) -> None:
    """Let the command die with the launcher, even if that is killed. Runs in the command's process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    die_with_parent(signal.SIGKILL, launcher)


def end_descendants(group: int | None) -> None:
    """Kill the process group of the command, and all children that are left, until there are none."""
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    while pids := children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """The children of this process; empty if the system does not list them."""
    try:
        texts = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    except OSError:
        return []
    return [int(pid) for text in texts for pid in text.split()]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
