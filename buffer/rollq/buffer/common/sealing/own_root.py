"""Namespaces: give this process a separate file system with only some folders, and no network."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Final

from rollq.buffer.common.sealing.kernel import c_call, system_call

_NEW_MOUNTS: Final = 0x00020000
_NEW_IPC: Final = 0x08000000
_NEW_USER: Final = 0x10000000
_NEW_NETWORK: Final = 0x40000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION, _NO_ACCESS_TIMES = 1, 2, 4, 8, 1024
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_KEPT: Final = _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_EXECUTION | _NO_ACCESS_TIMES
"""Mount flags that only the mount's original namespace may remove; `statvfs` shows these same bits."""
_DETACH: Final = 2
_BUILT_AT: Final = "/tmp"
_OLD: Final = "/.old"


def _outermost(folders: Iterable[str]) -> list[str]:
    """The folders that are not inside another of these folders."""
    found = list(folders)
    return [path for path in found if not any(path.startswith(f"{above}/") for above in found)]


def move_into_own_root(folders: Iterable[str]) -> None:
    """Leave this process, and everything it starts, only `folders`, read-only, and no network. Raises `OSError`.

    `folders` may be folders and files; missing or forbidden paths are skipped. The process must have a single thread.
    """
    seen = _outermost(filter(os.path.exists, folders))
    sources = list(map(os.path.realpath, seen))
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("the process has more than one thread, so it cannot get a user namespace")
    _become_alone()
    _mount("tmpfs", _BUILT_AT, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    os.chdir(_BUILT_AT)
    os.mkdir(f".{_OLD}")
    system_call("pivot_root", b".", f".{_OLD}".encode())
    os.chdir("/")
    _bind(seen, sources)
    c_call("umount2", _OLD.encode(), _DETACH)
    os.rmdir(_OLD)
    os.chdir(seen[0] if seen else "/")
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)


def _become_alone() -> None:
    """Enter new namespaces in which this process keeps its user."""
    user, group = os.geteuid(), os.getegid()
    c_call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_IPC | _NEW_NETWORK)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)


def _bind(paths: Sequence[str], sources: Sequence[str]) -> None:
    for path, source in zip(paths, sources, strict=True):
        if os.path.isdir(_OLD + source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(_OLD + source, path, None, _BIND | _RECURSIVE)
        _mount(None, path, None, _REMOUNT | _BIND | _READ_ONLY | os.statvfs(path).f_flag & _KEPT)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    c_call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
