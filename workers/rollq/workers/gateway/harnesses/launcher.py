"""Runs one command. Ends the command and all its descendants when the command exits, when this process gets SIGTERM,
and when this process's parent dies. In the last case, removes the command's folder too.

Run it as a program, `launcher PARENT FOLDER MAX_FILE_BYTES ENCLOSURE COMMAND...`. It imports only the standard library.
ENCLOSURE is empty, or the JSON of the command's `Enclosure`.

On Linux, descendants that leave the command's process group are ended too: as orphans they become children of this
process.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from rollq.buffer.common.child_processes import adopt_orphans, die_with_parent
from rollq.buffer.common.removing import remove_folder
from rollq.workers.gateway.harnesses import enclosure

NOT_FOUND = 127
PARENT_DIED = signal.SIGHUP
"""The signal that the system sends when the parent's thread that started this process dies; the worker sends SIGTERM.
The parent's id does not help: it stays the same while the parent's other threads are dying."""
AWAITED = {signal.SIGTERM, PARENT_DIED, signal.SIGCHLD}


def main(parent: int, folder: str, max_file_bytes: int, enclosed: str, command: list[str]) -> int:
    """Run the command. Returns its exit code, or 128 plus the number of the signal that ended it."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # a handler might run only after the next system call
    adopt_orphans()
    die_with_parent(PARENT_DIED, parent)
    if PARENT_DIED in signal.sigpending():
        remove_folder(folder)
        return 1
    limit_files(max_file_bytes)
    child = start_enclosed(enclosed, command) if enclosed else start(command)
    if child is None:
        return NOT_FOUND
    ended = wait_for(child)
    end_descendants(child)
    if ended == -PARENT_DIED or PARENT_DIED in signal.sigpending():
        remove_folder(folder)
    return ended if ended >= 0 else 128 - ended


def start(command: list[str]) -> int | None:
    """Start the command. Returns its process id. If that fails, prints a message and returns None."""
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=partial(prepare_command, os.getpid()))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return None
    child.returncode = 0  # awaited by process id
    return child.pid


def start_enclosed(text: str, command: list[str]) -> int:
    """Start a process that runs the command in namespaces. Returns its process id."""
    launcher = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        if os.getppid() == launcher:
            os._exit(enclosure.enclosed(enclosure.Enclosure.of_text(text), partial(run, command)))
    except OSError as error:
        print(f"the command cannot be enclosed: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(enclosure.CANNOT)


def run(command: list[str]) -> int:
    """Run the command as a child of its namespaces' first process. Returns its exit code, or 128 plus the signal that
    ended it."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the command may send SIGINT to this process
    child = start(command)
    if child is None:
        return NOT_FOUND
    while True:
        ended, status = os.waitpid(-1, 0)  # orphans are this process's children
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def wait_for(child: int) -> int:
    """Wait until the command ends or this process gets a signal. Returns the exit code, or minus the signal's
    number."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            return -number


def limit_files(most_bytes: int) -> None:
    """Limit the size of files that this process or the command writes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def prepare_command(launcher: int) -> None:
    """Make the command die with the launcher, even if the launcher is killed, and die first when memory runs out. Call
    this in the command's process."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    die_with_parent(signal.SIGKILL, launcher)


def end_descendants(group: int | None) -> None:
    """Kill the command's process group and all remaining children, until there are none."""
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
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
