"""Processes that an engine started end with the worker, and nothing else does. Plain Python stands in for vLLM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from rollq.workers.engines.vllm import watchdog
from rollq.workers.engines.vllm.guard import ProcessGuard
from rollq.workers.engines.vllm.watchdog import VARIABLE, environment, has_mark, marked
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SLEEP = "import time; time.sleep(3600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}"
NESTED = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
WORKER = f"""
import os, subprocess, sys, time
from rollq.workers.engines.vllm.guard import ProcessGuard

bystander = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
guard = ProcessGuard()
with guard.marking():
    subprocess.Popen([sys.executable, "-c", {NESTED!r}])
    stubborn = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
    if os.fork() == 0:
        time.sleep(3600)
stubborn.stdout.readline()
later = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(guard.mark, bystander.pid, later.pid, flush=True)
sys.stdin.readline()
raise SystemExit("an error")
"""
MARKED = 4


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watchdogs(mark: str) -> list[int]:
    """Living watchdogs for a mark."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if mark.encode() in command(pid).split(b"\0") and alive(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGTERM to all", "error"])
def test_processes_of_the_engine_end_with_the_worker_and_others_stay(ending: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        process_group=0,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert worker.stdin is not None
        mark, *others = worker.stdout.readline().decode().split()
        wait_until(lambda: len(marked(mark)) == MARKED)
        assert len(watchdogs(mark)) == 1
        if ending == "SIGKILL":
            worker.kill()
        elif ending == "SIGTERM to all":
            os.killpg(worker.pid, signal.SIGTERM)
        else:
            worker.stdin.close()
    wait_until(lambda: not marked(mark) and not watchdogs(mark), otherwise=lambda: (marked(mark), watchdogs(mark)))
    if ending != "SIGTERM to all":
        assert [alive(int(pid)) for pid in others] == [True, True]
        for pid in others:
            os.kill(int(pid), signal.SIGKILL)


def test_a_guard_ends_its_own_processes_and_its_watchdog() -> None:
    first, second = ProcessGuard(), ProcessGuard()
    with first.marking():
        one = subprocess.Popen([sys.executable, "-c", SLEEP])
    with second.marking():
        other = subprocess.Popen([sys.executable, "-c", SLEEP])
    with sleeper() as bystander:
        first.close()
        assert one.wait() == -signal.SIGTERM
        assert (watchdogs(first.mark), len(watchdogs(second.mark))) == ([], 1)
        assert (other.poll(), bystander.poll()) == (None, None)
        second.close()
        assert other.wait() == -signal.SIGTERM
        assert bystander.poll() is None
    assert VARIABLE not in os.environ


def test_processes_that_are_just_starting_a_program_have_the_mark() -> None:
    """Linux shows no environment of a process for a moment after it has replaced its program."""
    guard = ProcessGuard()
    for _ in range(100):
        with guard.marking():
            process = subprocess.Popen(["sleep", "3600"])
        assert has_mark(process.pid, guard.mark)
        process.kill()
        process.wait()
    guard.close()


def test_a_process_that_starts_one_program_after_another_always_has_the_mark() -> None:
    guard = ProcessGuard()
    again = 'exec sh -c "$0" "$0"'
    with guard.marking():
        process = subprocess.Popen(["sh", "-c", again, again])
    try:
        assert all(has_mark(process.pid, guard.mark) for _ in range(5000))
    finally:
        guard.close()
        process.wait()


@pytest.mark.parametrize("which", ["one that has ended", "a thread of the system"])
def test_a_process_without_memory_is_not_waited_for(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older systems show root an empty environment of it."""
    process = subprocess.Popen(["true"])
    wait_until(lambda: not alive(process.pid))
    stat = b"2 (kthreadd) S" + b" 0" * 49
    shown = {"stat": Path(f"/proc/{process.pid}/stat").read_bytes() if "ended" in which else stat, "environ": b""}
    monkeypatch.setattr(watchdog, "open", lambda path, _mode: BytesIO(shown[path.split("/")[-1]]), raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is waited for"))
    assert environment(process.pid) == b""
    process.wait()


def test_a_process_without_an_environment_or_one_that_has_ended_has_no_mark() -> None:
    with subprocess.Popen(["sleep", "3600"], env={}) as bare:
        assert environment(bare.pid) == b""
        assert not has_mark(bare.pid, "mark")
        bare.kill()
        wait_until(lambda: not alive(bare.pid))
        assert not has_mark(bare.pid, "mark")


def test_a_watchdog_that_is_killed_leaves_the_processes_to_the_worker() -> None:
    guard = ProcessGuard()
    with guard.marking():
        process = subprocess.Popen([sys.executable, "-c", SLEEP])
    for pid in watchdogs(guard.mark):
        os.kill(pid, signal.SIGKILL)
    guard.close()
    assert process.wait() == -signal.SIGTERM


def test_shared_memory_that_vllm_leaves_is_removed() -> None:
    name = f"/dev/shm/vllm_test_{os.getpid()}"
    guard = ProcessGuard()
    script = (
        "import mmap, sys, time\n"
        f"with open({name!r}, 'wb+') as file:\n"
        "    file.truncate(4096)\n"
        "    shared = mmap.mmap(file.fileno(), 4096)\n"
        "print(flush=True)\n"
        "time.sleep(3600)\n"
    )
    with guard.marking():
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        guard.close()
    assert not Path(name).exists()
