"""Copies an agent's workspace, for its tests, to a place that the agent's processes cannot reach."""

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollq.workers.gateway.harnesses.links import is_below, target

PROGRAMS: Final = "/usr"
"""Links into this folder stay: virtual environments have such links, and the folder holds no work or answers."""
MOST_FOLDERS_DEEP: Final = 200
MOST_ENTRIES: Final = 200_000
MOST_BYTES: Final = 4_000_000_000


class TooLarge(Exception):
    """A workspace exceeds the limit for copies."""


def copy_workspace(source: Path, workspace: Path, place: str) -> None:
    """Copy a workspace into an empty folder. `place` is its path for the agent and for the tests.

    Copies only files and folders that the worker can read, and links that lead into the workspace or to programs.
    Follows no link within `source`, even if a process still changes it. Raises `TooLarge`.
    """
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _Copy(str(source), str(workspace), place).folder(folder, str(workspace), 0)
    finally:
        os.close(folder)


@dataclass(slots=True)
class _Copy:
    source: str
    workspace: str
    place: str
    entries: int = 0
    bytes: int = 0

    def folder(self, opened: int, to: str, depth: int) -> None:
        """Copy the content of an open folder."""
        if depth > MOST_FOLDERS_DEEP:
            raise TooLarge(f"the workspace has folders nested more than {MOST_FOLDERS_DEEP} deep")
        for name in os.listdir(opened):
            self.entries += 1
            if self.entries > MOST_ENTRIES:
                raise TooLarge(f"the workspace has more than {MOST_ENTRIES:,} files and folders")
            try:
                self._entry(opened, name, to, depth)
            except PermissionError:  # the agent has removed the read permission
                continue

    def _entry(self, within: int, name: str, to: str, depth: int) -> None:
        mode, path = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode, f"{to}/{name}"
        if stat.S_ISLNK(mode):
            if text := self._link(os.readlink(name, dir_fd=within), to):
                os.symlink(text, path)
        elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
            try:
                self._opened(opened, path, depth)
            finally:
                os.close(opened)

    def _opened(self, opened: int, path: str, depth: int) -> None:
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(path)
            self.folder(opened, path, depth + 1)
        elif stat.S_ISREG(status.st_mode):
            self.bytes += status.st_size
            if self.bytes > MOST_BYTES:
                raise TooLarge(f"the workspace has more than {MOST_BYTES >> 20:,} MiB")
            with open(opened, "rb", closefd=False) as source, open(path, "xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        else:
            return
        os.chmod(path, status.st_mode & 0o777)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _link(self, text: str, folder: str) -> str:
        """The text of a link in the copy; empty if the link is left out."""
        if is_below(text, self.source):
            text = self.place + text.removeprefix(self.source)
        leads = target(self.workspace, folder, text)
        if leads is None or not is_below(leads, self.workspace, self.place, PROGRAMS):
            return ""
        return text
