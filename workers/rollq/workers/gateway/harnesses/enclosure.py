"""Encloses a command in Linux namespaces. The command sees only its own processes and no other session's folder, and
writes only to its folder, to `writable` folders and to temporary folders. Imports only the standard library.

`enclosed` runs a function as the namespaces' first process. When that process returns or is killed, the system ends all
processes in the namespaces. `problem` returns the reason why this system cannot enclose commands.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rollq.buffer.common.child_processes import bare_python
from rollq.buffer.common.sealing.kernel import c_call, system_call
from rollq.buffer.common.sealing.landlock import forbid_mounts_and_foreign_sockets

LEAST_PROCESSES: Final = 301
"""The smallest value that Linux accepts for a namespace's largest process id."""
OWN_LIMIT_SINCE: Final = (6, 14)
"""The first version of Linux in which each namespace has a separate largest process id."""
CANNOT: Final = 125
"""The exit code if the enclosure cannot be made."""
PROBE_S: Final = 60.0

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PROCESSES = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_BIND, _RECURSIVE, _UNBINDABLE, _PRIVATE = 4096, 16384, 1 << 17, 1 << 18
_DETACH: Final = 2
_MOUNT_SETATTR: Final = 442
_HERE: Final = -100
_ALL_BELOW: Final = 0x8000
_DIE_WITH_PARENT, _DROP_CAPABILITY = 1, 24
_KEPT_CAPABILITIES: Final = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
"""Root's remaining rights: files of all owners, other users, low ports, chroot; no mounts, no devices."""
_KERNEL_FILES: Final = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""The machine's settings in /proc, which root could change."""
_DEVICES: Final = ("/dev/full", "/dev/null", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero")
_DEVICE_LINKS: Final = {
    "/dev/fd": "/proc/self/fd",
    "/dev/ptmx": "pts/ptmx",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
}
_SYSTEM: Final = frozenset({
    "/bin", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Enclosure:
    """One session's limits. `root` is its folder, in the folder of all sessions. The command may write to `root` and to
    the `writable` folders. `hidden` files and folders appear empty. `places` holds pairs of a folder below `root` and a
    second path for that folder, such as `/app`. At most `most_processes` processes and threads run at the same time.
    /tmp and shared memory hold at most `most_bytes` each."""

    root: str
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()
    most_processes: int = 1000
    most_bytes: int = 256_000_000

    def as_text(self) -> str:
        """The enclosure as JSON, for `of_text`."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "Enclosure":
        """The enclosure in a text from `as_text`."""
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("writable", "hidden")}
        return cls(**{**fields, **lists, "places": tuple(map(tuple, fields["places"]))})


def enclosed(enclosure: Enclosure, work: Callable[[], int]) -> int:
    """Run `work` as the first process in new namespaces. Returns the exit code, or 128 plus the signal that ended it.

    Call this in a process with a single thread and no other work: the process stays outside, in the mount namespace.
    Raises `OSError`.
    """
    parent = os.getppid()
    _unshare()
    c_call("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(CANNOT)
    alive, is_alive = os.pipe()
    first = os.fork()
    if not first:
        code = CANNOT
        try:
            os.close(is_alive)
            c_call("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            if select.select([alive], [], [], 0)[0]:  # the other end is closed: the parent has died
                os._exit(CANNOT)
            _build(enclosure)
            code = work()
        except OSError as error:
            print(f"the command cannot be enclosed: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def check_place(path: str) -> None:
    """Raise `ValueError` unless an enclosure can use this path as a place."""
    if not re.fullmatch(r"/[A-Za-z0-9_-][A-Za-z0-9._-]*", path) or path in _SYSTEM:
        raise ValueError("must be a path directly below /, as /app, and no folder of the system")


def problem(enclosure: Enclosure) -> str:
    """The reason why this enclosure cannot be made; empty if it can be made."""
    if sys.platform != "linux":
        return "needs Linux"
    command = bare_python(__name__, enclosure.as_text())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if not done.returncode else done.stderr.strip()[-500:] or f"exit code {done.returncode}"


def limit_processes(most: int) -> None:
    """Limit this process namespace to `most` processes and threads, if the system supports it. Root needs Linux 6.14;
    other users get a per-user limit within the user namespace."""
    if _version() >= OWN_LIMIT_SINCE:  # in older versions the limit is for the whole machine
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(max(most, LEAST_PROCESSES)))
    if os.geteuid():
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def _unshare() -> None:
    """Enter new namespaces. Root needs no user namespace if it has the rights. Other users need a user namespace, and
    keep their ids."""
    kinds = _NEW_MOUNTS | _NEW_PROCESSES | _NEW_IPC
    with contextlib.suppress(PermissionError):
        c_call("unshare", kinds)
        return
    user, group = os.geteuid(), os.getegid()
    c_call("unshare", kinds | _NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _build(enclosure: Enclosure) -> None:
    """Build the enclosure from inside, as the first process of its namespaces. Raises `OSError`."""
    place, sessions = os.getcwd(), os.path.dirname(enclosure.root)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    if enclosure.places:
        _change_root(f"{enclosure.root}/tmp", [path for _, path in enclosure.places])
    kept = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (*enclosure.writable, enclosure.root)}
    _set_read_only("/", True)
    _cover_devices()
    _cover_sockets((sessions, *enclosure.writable))
    _cover_temporary(sessions, f"size={enclosure.most_bytes},mode=1777")
    _mount("tmpfs", sessions, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=64k,mode=755")
    os.mkdir(enclosure.root)
    for path, file in kept.items():  # opened before anything covered them
        _mount(f"/proc/self/fd/{file}", path, None, _BIND | _RECURSIVE)
        _set_read_only(path, False)
        os.close(file)
    for source, path in enclosure.places:
        _mount(source, path, None, _BIND)
    for path in filter(os.path.exists, enclosure.hidden):
        _hide(path)
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_EXECUTION)
    limit_processes(enclosure.most_processes)
    for path in filter(os.path.exists, _KERNEL_FILES):
        _mount(path, path, None, _BIND)
        _set_read_only(path, True)
    os.chdir(place)
    with contextlib.suppress(OSError):  # before Linux 5.19, or without Landlock
        forbid_mounts_and_foreign_sockets()
    for capability in range(64):
        if capability not in _KEPT_CAPABILITIES:
            with contextlib.suppress(OSError):  # beyond the last one
                c_call("prctl", _DROP_CAPABILITY, capability, 0, 0, 0)


def _change_root(free: str, added: Sequence[str]) -> None:
    """Make a root folder with the old root's content, and put the empty `added` folders over entries with the same
    names. `free` is an empty folder."""
    _mount("tmpfs", free, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=64k,mode=755")
    _mount(None, free, None, _UNBINDABLE)  # otherwise it would contain itself
    with os.scandir("/") as entries:
        for entry in (entry for entry in entries if entry.path not in added):
            target = f"{free}{entry.path}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_dir():
                os.mkdir(target)
                _mount(entry.path, target, None, _BIND | _RECURSIVE)
            else:
                os.close(os.open(target, os.O_CREAT))
                _mount(entry.path, target, None, _BIND)
    for path in added:
        os.mkdir(f"{free}{path}")
    os.chdir(free)
    system_call("pivot_root", b".", b".")
    c_call("umount2", b".", _DETACH)  # the old root, which covers the new one
    os.chdir("/")


def _hide(path: str) -> None:
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", _READ_ONLY | _NO_SETUID | _NO_DEVICES, "size=4k,mode=755")
    else:
        _mount("/dev/null", path, None, _BIND)


def _cover_devices() -> None:
    """Cover all devices except stateless devices and the enclosure's terminals: no disks, no kernel log, and no user's
    terminal."""
    opened = {path: os.open(path, os.O_PATH) for path in filter(os.path.exists, _DEVICES)}
    _mount("tmpfs", "/dev", "tmpfs", _NO_SETUID | _NO_EXECUTION, "size=64k,mode=755")
    for path, file in opened.items():
        os.close(os.open(path, os.O_CREAT))
        _mount(f"/proc/self/fd/{file}", path, None, _BIND)
        os.close(file)
    for path in ("/dev/pts", "/dev/shm"):
        os.mkdir(path)
    _mount("devpts", "/dev/pts", "devpts", _NO_SETUID | _NO_EXECUTION, "newinstance,ptmxmode=0666,mode=620")
    for path, to in _DEVICE_LINKS.items():
        os.symlink(to, path)


def _cover_sockets(needed: Sequence[str]) -> None:
    """Cover the folder with the system's sockets, since some of their servers start programs outside the enclosure.
    The file with the name servers stays, and the `needed` folders are empty."""
    names = os.path.realpath("/etc/resolv.conf")
    opened = os.open(names, os.O_PATH) if names.startswith("/run/") and os.path.exists(names) else None
    _mount("tmpfs", "/run", "tmpfs", _NO_SETUID | _NO_DEVICES, "size=64k,mode=755")
    for path in (path for path in needed if path.startswith("/run/")):
        os.makedirs(path, exist_ok=True)
    if opened is not None:
        os.makedirs(os.path.dirname(names), exist_ok=True)
        os.close(os.open(names, os.O_CREAT))
        _mount(f"/proc/self/fd/{opened}", names, None, _BIND)
        os.close(opened)


def _cover_temporary(free: str, options: str) -> None:
    """Let programs write to /tmp, which keeps its content, and to shared memory. Other processes do not see the writes.
    `free` is a folder that is covered later."""
    _mount("tmpfs", "/dev/shm", "tmpfs", _NO_SETUID | _NO_DEVICES, options)
    _mount("tmpfs", free, "tmpfs", _NO_SETUID | _NO_DEVICES, options)
    changed, work = f"{free}/changed", f"{free}/work"
    for path in (changed, work):
        os.mkdir(path)
        os.chmod(path, 0o1777)
    layers = f"lowerdir=/tmp,upperdir={changed},workdir={work}"
    _mount("overlay", "/tmp", "overlay", _NO_SETUID | _NO_DEVICES, layers)


def _set_read_only(path: str, value: bool) -> None:
    """With `value`, make a mount and all mounts below it read-only; otherwise, make the mount writable. Needs Linux
    5.12."""
    attributes = (ctypes.c_uint64 * 4)(*((1, 0) if value else (0, 1)), 0, 0)
    flags = _ALL_BELOW if value else 0
    c_call("syscall", _MOUNT_SETATTR, _HERE, path.encode(), flags, ctypes.byref(attributes), ctypes.sizeof(attributes))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        c_call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {os.strerror(error.errno or 0)}") from None


def main(arguments: Sequence[str]) -> int:
    """Try to make an enclosure. The exit code reports whether that works."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os._exit(enclosed(Enclosure.of_text(arguments[0]), lambda: 0))
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(CANNOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
