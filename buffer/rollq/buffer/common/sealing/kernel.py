"""Linux system calls by number, where the C library and Python have no function. Imports only the standard library."""

import ctypes
import os
import sys
from typing import Any, Final

_NUMBERS: Final = {
    "capset": (126, 91),
    "pivot_root": (155, 41),
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""Numbers on x86_64 and aarch64."""
_COLUMNS: Final = {"x86_64": 0, "aarch64": 1}
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITIES_V3: Final = 0x20080522


def column() -> int:
    """This machine's index in pairs of (x86_64, aarch64). Raises `OSError` on any other machine."""
    machine = os.uname().machine if sys.platform == "linux" and sys.maxsize > 1 << 32 else ""
    if machine not in _COLUMNS:
        raise OSError(f"needs 64-bit Python on Linux, on {' or '.join(_COLUMNS)}")
    return _COLUMNS[machine]


def system_call(name: str, *arguments: Any) -> int:
    """Make a system call and return its result. Integers are passed as longs. Raises `OSError`."""
    return _checked(name, "syscall", _NUMBERS[name][column()], *arguments)


def c_call(name: str, *arguments: Any) -> int:
    """Call a C library function that returns -1 for an error; returns its result. Raises `OSError`."""
    return _checked(name, name, *arguments)


def give_up_new_rights() -> None:
    """Permanently prevent this process from gaining rights by executing a program."""
    c_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def give_up_capabilities() -> None:
    """Make root an ordinary user."""
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    system_call("capset", ctypes.byref(header), ctypes.byref(nothing))


def hide_memory() -> None:
    """Keep the user's other processes from reading this process's memory, and write no core file."""
    c_call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def _checked(name: str, function: str, *arguments: Any) -> int:
    call = getattr(ctypes.CDLL(None, use_errno=True), function)
    call.restype = ctypes.c_long if function == "syscall" else ctypes.c_int
    result: int = call(*(ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
