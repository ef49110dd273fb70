"""Hides this process's environment from other processes of its user."""

import ctypes
import os
import sys
from collections.abc import Collection

_START, _END = 50 - 3, 51 - 3
"""Indices of `env_start` and `env_end` in /proc/PID/stat, counted from the state; see proc_pid_stat(5)."""


def hide_environment(shown: Collection[str]) -> None:
    """On Linux, remove all variables except `shown` from /proc/PID/environ. This process and its children keep the
    variables, copied to other memory that only a debugger can read."""
    if sys.platform != "linux":
        return
    os.environb.update(dict(os.environb))  # into memory of the C library
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    try:
        with open("/proc/self/environ", "rb") as file:
            variables = file.read()
    except PermissionError:  # the memory of this process is hidden, and so is its environment
        return
    place, end = int(fields[_START]), int(fields[_END])
    if not place or place + len(variables) > end:
        return
    for variable in variables.split(b"\0")[:-1]:
        if os.fsdecode(variable.partition(b"=")[0]) not in shown:
            ctypes.memset(place, 0, len(variable))
        place += len(variable) + 1
