"""Processes that seal themselves, and real attempts to get out, as root and as an ordinary user, by each means."""

import ctypes
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from rollq.buffer.common.sealing import probe
from rollq.buffer.common.sealing.kernel import c_call
from rollq.buffer.common.sealing.probe import require_sealing, sealing_available
from rollq.buffer.common.sealing.process import (
    Means,
    address_space,
    allow_only_computing_with,
    hide_files,
)
from rollq.buffer.errors import ConfigError
from support.waiting import PATIENCE_S

NOBODY: Final = 65534
SPARE: Final = 1 << 28
F_SETOWN, F_SETSIG, PTRACE_ATTACH, PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 8, 10, 16, 1, 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")


@pytest.fixture(params=list(Means))
def means(request: pytest.FixtureRequest) -> Means:
    """Each way to hide files. A kernel that lacks it must say so: then the refusal is what is tested."""
    if reason := sealing_available()[request.param]:
        assert reason in forked(lambda: None, request.param)
        pytest.skip(f"this kernel has none: {reason}")
    found: Means = request.param
    return found


@pytest.fixture(params=["as it is", "as nobody"])
def as_nobody(request: pytest.FixtureRequest) -> bool:
    """Whether root first becomes an ordinary user; whoever is none stays who he is."""
    return bool(request.param == "as nobody" and os.geteuid() == 0)


def forked(work: Callable[[], object], means: Means | None, *, as_nobody: bool = False, computing: bool = True) -> str:
    """What `work` does in a sealed process: the kind of its error and the error, or "did it". None: without a seal."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            memory = address_space() + SPARE
            if as_nobody:
                become_nobody()
            if means:
                hide_files([means])
            if means and computing:
                allow_only_computing_with(memory)
            work()
            answer = "did it"
        except BaseException as error:  # noqa: BLE001 - the test reads it
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return answer or f"ended with {os.waitstatus_to_exitcode(status)}"


def become_nobody() -> None:
    """Be an ordinary user, as after a login: with a readable folder of facts in /proc."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    c_call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


@pytest.fixture
def victim(as_nobody: bool) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the same user, which waits for its input."""
    user = NOBODY if as_nobody else None
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, user=user) as process:
        yield process
        process.kill()


@pytest.fixture
def mine(as_nobody: bool) -> Iterator[Path]:
    """A file that the sealed process owns and may write, in a folder that it may write.

    Not in `tmp_path`: each start of pytest closes the folder around those of all others to other users.
    """
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "mine"
        file.write_text("secret")
        if as_nobody:
            os.chown(name, NOBODY, NOBODY)
            os.chown(file, NOBODY, NOBODY)
        yield file


def test_this_kernel_can_seal_in_both_ways_or_says_why_not() -> None:
    found = sealing_available()
    assert set(found) == set(Means)
    assert not all(found.values()), f"no test of sealed processes can run here: {found}"


@pytest.mark.parametrize("computing", [False, True], ids=["files", "all"])
def test_a_sealed_process_neither_reads_nor_changes_files(
    means: Means, mine: Path, *, as_nobody: bool, computing: bool
) -> None:
    """Both steps together, and the first alone."""
    attempts: list[Callable[[], object]] = [
        mine.read_bytes,
        lambda: os.listdir(mine.parent),
        Path("/etc/passwd").read_bytes,
        Path("/proc/self/environ").read_bytes,
        Path(f"/proc/{os.getpid()}/environ").read_bytes,
        Path(f"/proc/{os.getpid()}/maps").read_bytes,
        lambda: mine.write_text("changed"),
        lambda: os.open(mine, os.O_RDWR),
        lambda: os.open(mine.parent, os.O_TMPFILE | os.O_WRONLY),
        (mine.parent / "made").touch,
        (mine.parent / "made").mkdir,
        lambda: os.symlink("mine", mine.parent / "made"),
        lambda: os.link(mine, mine.parent / "made"),
        lambda: os.rename(mine, mine.parent / "made"),
        lambda: os.mkfifo(mine.parent / "made"),
        mine.unlink,
    ]
    for attempt in attempts:
        assert forked(attempt, means, as_nobody=as_nobody, computing=computing).startswith(
            ("PermissionError", "FileNotFoundError", "OSError: [Errno 30]")
        )
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert mine.read_text() == "secret"


def test_without_a_seal_the_same_attempts_work(
    mine: Path, victim: "subprocess.Popen[bytes]", *, as_nobody: bool
) -> None:
    attempts: list[Callable[[], object]] = [
        mine.read_bytes,
        Path("/etc/passwd").read_bytes,
        (mine.parent / "made").touch,
        socket.socketpair,
        lambda: os.sched_setaffinity(victim.pid, os.sched_getaffinity(0)),
        lambda: os.kill(victim.pid, signal.SIGKILL),
        mine.unlink,
    ]
    assert [forked(attempt, None, as_nobody=as_nobody) for attempt in attempts] == ["did it"] * len(attempts)
    assert victim.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_sealed_process_reaches_no_other(means: Means, victim: "subprocess.Popen[bytes]", *, as_nobody: bool) -> None:
    def through_a_pipe() -> None:
        """Have the kernel send the signal, as the owner of a file descriptor may."""
        for command, value in ((F_SETOWN, victim.pid), (F_SETSIG, signal.SIGKILL)):
            c_call("fcntl", 1, command, value)

    attempts: list[Callable[[], object]] = [
        lambda: os.kill(victim.pid, signal.SIGKILL),
        lambda: os.killpg(0, signal.SIGKILL),
        lambda: signal.pidfd_send_signal(os.pidfd_open(victim.pid), signal.SIGKILL),
        lambda: c_call("ptrace", PTRACE_ATTACH, victim.pid, 0, 0),
        lambda: c_call("process_vm_readv", victim.pid, None, 0, None, 0, 0),
        lambda: c_call("prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0),
        lambda: os.sched_setaffinity(victim.pid, {0}),
        lambda: os.setpriority(os.PRIO_PROCESS, victim.pid, 19),
        lambda: resource.prlimit(victim.pid, resource.RLIMIT_CPU, (1, 1)),
        through_a_pipe,
    ]
    for attempt in attempts:
        assert "Operation not permitted" in forked(attempt, means, as_nobody=as_nobody)
    assert victim.poll() is None


def test_a_sealed_process_reaches_no_socket(means: Means, *, as_nobody: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("")  # to a name that no other process has
        abstract.listen()
        attempts: list[Callable[[], object]] = [
            lambda: socket.create_connection(tcp.getsockname()),
            lambda: socket.socket(socket.AF_UNIX).connect(abstract.getsockname()),
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", tcp.getsockname()),
            socket.socketpair,
        ]
        for attempt in attempts:
            assert "Operation not permitted" in forked(attempt, means, as_nobody=as_nobody)


def test_a_sealed_process_starts_nothing(means: Means, *, as_nobody: bool) -> None:
    attempts: dict[str, Callable[[], object]] = {
        "Operation not permitted": os.fork,
        "Errno 1": lambda: os.execv("/bin/true", ["true"]),
        "can't start new thread": threading.Thread(target=print).start,
        "unshare": lambda: c_call("unshare", 0x10000000),
        "setuid": lambda: c_call("setuid", 0),
        "chroot": lambda: c_call("chroot", b"/usr"),
        "mount": lambda: c_call("mount", b"none", b"/usr", b"tmpfs", ctypes.c_ulong(0), None),
    }
    for reason, attempt in attempts.items():
        assert reason in forked(attempt, means, as_nobody=as_nobody)


@pytest.mark.parametrize("sharing", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_a_sealed_process_gets_no_more_memory_than_it_may(means: Means, sharing: int) -> None:
    def take(pieces: int) -> None:
        taken = [mmap.mmap(-1, SPARE // 8, flags=sharing | mmap.MAP_ANONYMOUS) for _ in range(pieces)]
        assert len(taken) == pieces

    assert forked(lambda: take(6), means) == "did it"
    assert forked(lambda: take(9), means).startswith("OSError: [Errno 12]")
    assert "Operation not permitted" in forked(lambda: os.memfd_create("more"), means)
    assert "Too many open files" in forked(lambda: [os.dup(1) for _ in range(100)], means)


def test_a_sealed_process_still_computes_and_imports(means: Means) -> None:
    def compute() -> None:
        sympy = import_module("sympy")  # installed, and not imported before
        x = sympy.symbols("x")
        assert sympy.integrate(x**2, (x, 0, 3)) == 9
        assert os.urandom(4) != os.urandom(4)
        assert os.cpu_count()

    assert forked(compute, means) == "did it"


def test_a_sealed_process_has_the_time_zones_of_the_system(means: Means) -> None:
    def zones() -> list[str]:
        named = [Path(folder, "Europe/Berlin") for folder in zoneinfo.TZPATH]
        return [str(path) for path in (*named, Path("/etc/localtime")) if path.exists() and path.read_bytes()]

    known = zones()

    def look() -> None:
        assert zones() == known

    assert forked(look, means) == "did it"


def test_all_reasons_are_given_if_a_process_cannot_be_sealed() -> None:
    """Linux stacks few Landlock rules, and lets a process under them mount nothing."""

    def seal_too_often() -> None:
        for _ in range(20):
            hide_files()

    if reason := sealing_available()[Means.LANDLOCK]:
        pytest.skip(f"this kernel has no Landlock: {reason}")
    said = forked(seal_too_often, None)
    assert re.fullmatch(r"OSError: Landlock: .*landlock_restrict_self: .*; namespaces: .*Permission denied.*", said)


def test_a_process_with_threads_gets_no_namespaces() -> None:
    def with_a_thread() -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        hide_files([Means.NAMESPACES])

    assert "namespaces: the process has more than one thread" in forked(with_a_thread, None)


def test_a_seal_that_the_kernel_does_not_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_sealing("judge", "do without")
    monkeypatch.setattr(probe, "sealing_available", lambda: dict.fromkeys(Means, "unshare: Operation not permitted"))
    with pytest.raises(ConfigError, match="judge: this system cannot seal processes \\(Landlock: unshare: Operation"):
        require_sealing("judge", "do without")
