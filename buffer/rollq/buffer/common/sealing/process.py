"""A process that seals itself in two steps: files and rights first, then system calls and memory. Standard library
only.

The first step is for a parent process that prepares, and forks a child for each piece of work. The second step is for
the child. The system must offer a system call filter, and one way to hide files: Landlock, or user and mount
namespaces.
"""

import os
import resource
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final

import rollq
from rollq.buffer.common.sealing.kernel import give_up_capabilities, give_up_new_rights, hide_memory
from rollq.buffer.common.sealing.landlock import allow_only_reading
from rollq.buffer.common.sealing.own_root import move_into_own_root
from rollq.buffer.common.sealing.system_calls import allow_only_computing


class Means(StrEnum):
    """Ways to hide files, the preferred one first."""

    LANDLOCK = "Landlock"
    NAMESPACES = "namespaces"


_HIDE: Final[Mapping[Means, Callable[[Iterable[str]], None]]] = {
    Means.LANDLOCK: allow_only_reading,
    Means.NAMESPACES: move_into_own_root,
}
_SYSTEM: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo"),
)
"""The system's paths for shared libraries, and for time zones."""
MOST_FILES: Final = 64
"""The most open files that a sealed process may have."""


def python_folders() -> list[str]:
    """Folders with Python, installed packages, rollq, shared libraries and time zones, both as named and with links
    resolved. A program's own folder and the folders in `PYTHONPATH` are excluded.
    """
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += site.getsitepackages()
    if (own := site.getusersitepackages()) in sys.path:
        installed.append(own)
    installed += rollq.__path__
    named = [os.path.abspath(path) for path in (*installed, *_SYSTEM)]
    return list(dict.fromkeys([*named, *map(os.path.realpath, named)]))


def hide_files(means: Iterable[Means] = tuple(Means)) -> None:
    """Seal the files: this process, and everything it starts, can then read only `python_folders()`, write nothing, and
    use no root rights. Raises `OSError` with all reasons if no method works here."""
    folders = python_folders()
    reasons: list[str] = []
    for one in means:
        try:
            give_up_new_rights()
            _HIDE[one](folders)
        except OSError as error:
            reasons.append(f"{one}: {error}")
        else:
            give_up_capabilities()
            hide_memory()
            return
    raise OSError("; ".join(reasons))


def address_space() -> int:
    """Bytes of address space that this process uses. Call it before files are hidden."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def allow_only_computing_with(memory: int) -> None:
    """Seal the rest: no processes, threads, sockets or signals, and only `memory` bytes of address space. Raises
    `OSError`.

    Files must be hidden already.
    """
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: MOST_FILES,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    allow_only_computing()
