"""The small process that ends vLLM's processes when the worker has died. It runs as a script, and imports only the
standard library.

vLLM starts processes that outlive it when it is killed, and that keep gigabytes of memory and the GPU's memory. The
watchdog recognises these processes by a mark. A spawned process has the mark in its environment, as `MARK=...`. A
forked process shows its parent's environment, but inherits the open file with the mark's name. Child processes inherit
both. Needs Linux: on other systems, no process is found.

usage: watchdog.py WORKER_PID MARK
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

VARIABLE = "ROLLQ_ENGINE"
"""The environment variable with the mark."""
GRACE_S = 2.0
"""How many seconds a process may take to end after SIGTERM."""
PATIENCE_S = 30.0
"""How many seconds to wait for a process to end after SIGKILL. A process that hangs in a driver may never end."""
LOOK_S = 0.1
"""Pause between two checks of the processes."""
START_S = 1.0
"""How many seconds to wait for the environment of a process that starts a program."""
START_LOOK_S = 0.001
"""Pause between two checks of a process that starts a program."""
MEMORY_BYTES, ENV_START = 23 - 3, 50 - 3
"""The positions of `vsize` and `env_start` (followed by `env_end`) in /proc/PID/stat, counted from the state; see
proc_pid_stat(5). The last two are 0 while a program starts."""


def main(worker: int, mark: str) -> None:
    """Wait until the parent process `worker` has died, then end all processes with the mark."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to all processes of a service concerns only the worker
    while os.getppid() == worker:
        time.sleep(LOOK_S)
    end_marked(mark)


def end_marked(mark: str, memory: Iterable[str] = ()) -> set[int]:
    """End all processes with the mark, including processes that they start in the meantime. Returns the pids that do
    not end.

    Then remove the processes' shared memory, and the files in `memory`, from processes that died earlier. Spare this
    process: it may be the worker, which may have the marking file open.
    """
    began_s = time.monotonic()
    asked: set[int] = set()
    files = set(memory)
    while pids := marked(mark):
        files |= shared_memory(pids)
        send(pids - asked, signal.SIGTERM)
        asked |= pids
        past_s = time.monotonic() - began_s
        if past_s > GRACE_S:
            send(pids, signal.SIGKILL)
        if past_s > GRACE_S + PATIENCE_S:
            return pids
        time.sleep(LOOK_S)
    unlink(files)
    return set()


def marked(mark: str) -> set[int]:
    """The living processes with the mark, except this process."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} if os.path.isdir("/proc") else set()
    return {pid for pid in pids - {os.getpid()} if has_mark(pid, mark)}


def has_mark(pid: int, mark: str) -> bool:
    """Whether a process has the mark; False when the process has ended or belongs to another user."""
    try:
        # Files are checked first: a process that starts a program closes the file with the mark, and then has the
        # variable.
        if any(mark in target(f"/proc/{pid}/fd/{file}") for file in os.listdir(f"/proc/{pid}/fd")):
            return True
        return f"{VARIABLE}={mark}".encode() in environment(pid).split(b"\0")
    except OSError:
        return False


def environment(pid: int) -> bytes:
    """A process's environment: `NAME=value` entries separated by zero bytes. Raises `OSError`.

    While a process starts a program, Linux shows no environment; this function waits for one, usually for microseconds.
    Empty for a process without memory: an ending process, or a thread of the system.
    """
    deadline_s = time.monotonic() + START_S
    while True:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read()
        start, end = fields[ENV_START : ENV_START + 2]
        is_empty = start == end != b"0"  # none before and after: it started no program in between
        if variables or is_empty or fields[MEMORY_BYTES] == b"0" or time.monotonic() > deadline_s:
            return variables
        time.sleep(START_LOOK_S)


def target(link: str) -> str:
    """The target of a link, empty if the link is gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The processes' shared memory files, which stay when a process is killed. Python's files start with `psm_`."""
    segments = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as maps:
                files = {line.rstrip().partition("/dev/shm/")[2] for line in maps}
                segments |= {f"/dev/shm/{name}" for name in files if name.startswith(("psm_", "vllm_"))}
        except OSError:
            continue
    return segments


def unlink(files: Iterable[str]) -> None:
    """Remove files, unless they are gone."""
    for file in files:
        try:
            os.unlink(file)
        except OSError:
            continue


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
