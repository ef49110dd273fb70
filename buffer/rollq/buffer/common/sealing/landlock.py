"""Landlock: restricts this process to opening files in some folders, and only for reading."""

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from rollq.buffer.common.sealing.kernel import system_call

_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_MAKE_DEVICES: Final = 1 << 6 | 1 << 11
"""Character and block devices. Handling any right to files denies mounts."""
_MOVE: Final = 1 << 13
"""Moves between folders. Landlock denies them if it handles any right to files, unless this right is allowed."""
_FILE_RIGHTS: Final = ((1, 13), (2, 14), (3, 15), (5, 16))
"""(interface version, number of file rights that it knows)."""
_MOVES_SINCE: Final = 2
_NET_SINCE: Final = 4
_SCOPES_SINCE: Final = 6
_SCOPE_ABSTRACT_SOCKETS: Final = 1
_VERSION: Final = 1
_PATH_BENEATH: Final = 1


def version() -> int:
    """The version of the kernel's interface. Raises `OSError` if Landlock is missing or off."""
    return system_call("landlock_create_ruleset", None, 0, _VERSION)


def allow_only_reading(folders: Iterable[str]) -> None:
    """Deny this thread, and everything it starts, all files outside `folders`, all changes to files, TCP, signals to
    other processes, and their abstract sockets, as far as the kernel knows these rights. Raises `OSError`.

    `folders` may be folders and files; missing or forbidden paths are skipped. Call `give_up_new_rights` first.
    """
    known = version()
    rights = (1 << max(count for since, count in _FILE_RIGHTS if since <= known)) - 1
    attributes = struct.pack("QQQ", rights, 3 * (known >= _NET_SINCE), 3 * (known >= _SCOPES_SINCE))
    rules = system_call("landlock_create_ruleset", ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        for path in folders:
            with suppress(FileNotFoundError, PermissionError):
                _allow(rules, path, _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE)
        system_call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def forbid_mounts_and_foreign_sockets() -> None:
    """Deny this thread, and everything it starts, mounts (even in new namespaces), new devices, and other processes'
    abstract Unix sockets, as far as the kernel knows these rights. Raises `OSError`, including on Linux before 5.19.

    Call `give_up_new_rights` first, unless the process is root in its namespace.
    """
    known = version()
    if known < _MOVES_SINCE:
        raise OSError("the kernel's Landlock would deny moves of files from one folder to another")
    scopes = _SCOPE_ABSTRACT_SOCKETS * (known >= _SCOPES_SINCE)
    attributes = struct.pack("QQQ", _MAKE_DEVICES | _MOVE, 0, scopes)
    rules = system_call("landlock_create_ruleset", ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        _allow(rules, "/", _MOVE)
        system_call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, place)
        system_call("landlock_add_rule", rules, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(place)
