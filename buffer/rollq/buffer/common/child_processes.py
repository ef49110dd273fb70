"""Child processes that end with their parent, even if the parent is killed. Imports only the standard library, to start
fast."""

import ctypes
import os
import sys
from typing import Final

import rollq

INHERITED: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH")
"""The worker's environment variables that user-named programs inherit; none is a secret of rollq."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def bare_python(module: str, *arguments: object) -> list[str]:
    """The command that runs a rollq module that imports only the standard library; no other packages are searched."""
    paths = [os.path.dirname(folder) for folder in rollq.__path__]
    run = f"import runpy, sys; sys.path += {paths!r}; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"
    return [sys.executable, "-I", "-S", "-c", run, module, *map(str, arguments)]


def die_with_parent(number: int, parent: int) -> None:
    """On Linux, make the kernel send this process the signal `number` when its parent dies.

    `parent` is the parent's process id. If the parent is already dead, the signal comes at once, on any system.
    """
    if sys.platform == "linux":
        _process_control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """On Linux, become the parent of all descendants whose own parent dies; elsewhere, do nothing."""
    if sys.platform == "linux":
        _process_control(_PR_SET_CHILD_SUBREAPER, 1)


def _process_control(option: int, value: int) -> None:
    """Linux's `prctl`; see its manual page."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
