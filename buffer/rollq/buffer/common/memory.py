"""The memory that processes on this machine may use, which may be limited in a container."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Final

_V2: Final = ("sys/fs/cgroup", "memory.max")
_V1: Final = ("sys/fs/cgroup/memory", "memory.limit_in_bytes")


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of the machine's memory, or this process's lowest control group limit if that is less. `root` is the folder
    with `/proc` and `/sys`.
    """
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's control group and its ancestors, in both versions. In a container without access to
    the path, the outermost group is the container's group."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = _V1 if controllers else _V2
        for group in accumulate(Path(path).parts[1:], Path.__truediv__, initial=root / folder):
            with suppress(OSError, ValueError):  # a missing group, or "max"
                yield int((group / name).read_text())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no control groups on this system
        return []
