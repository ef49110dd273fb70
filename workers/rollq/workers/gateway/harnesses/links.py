"""Removes links that a command has left in its workspace, before anybody looks at its work.

Each link is judged by its text, and no link on its way is followed: every link in a workspace is looked at, so links
that stay lead through nothing but links that stay. The time does not depend on how long a chain of them is.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollq.buffer.common.removing import remove_folder

LONGEST: Final = 2_000
"""Bytes of a path below a workspace. Together with the path of the workspace, each can be named to the system."""


def remove_links(workspace: Path, stays: Callable[[str | None], bool]) -> int:
    """Remove links whose target does not stay, as `target` gives it, and folders whose path is too long; returns how
    many."""
    root, removed = str(workspace), 0
    if workspace.is_symlink() or not workspace.is_dir():
        workspace.unlink(missing_ok=True)
        workspace.mkdir()
        removed += 1
    for path in _links_and_deep_folders(root):
        if not os.path.islink(path):
            remove_folder(path)
        elif stays(target(root, os.path.dirname(path), os.readlink(path))):
            continue
        else:
            os.unlink(path)
        removed += 1
    return removed


def target(root: str, folder: str, text: str) -> str | None:
    """Where a link in `folder`, which is `root` or below, leads if no other link is on its way.

    None if `..` leads above `root`, or follows a name: then it depends on where the root is, or on other links.
    """
    here, parts = ("", text.split("/")) if text.startswith("/") else (folder, text.split("/"))
    names = [part for part in parts if part not in ("", ".")]
    while names and names[0] == ".." and here != root:
        here = os.path.dirname(here).rstrip("/")
        del names[0]
    if ".." in names:
        return None
    return "/".join((here, *names))


def is_below(path: str, *folders: str) -> bool:
    """Whether a path is one of the folders, or below."""
    return f"{path}/".startswith(tuple(f"{folder}/" for folder in folders))


def _links_and_deep_folders(root: str) -> Iterator[str]:
    """The paths of links below a folder, and of folders so deep that nothing in them is looked at."""
    waiting = [root]
    while waiting:
        here = waiting.pop()
        if len(os.fsencode(here)) - len(os.fsencode(root)) > LONGEST:
            yield here
            continue
        with suppress(OSError):  # of another user; nobody else can enter it either
            os.chmod(here, os.lstat(here).st_mode & 0o7777 | 0o700)
        with os.scandir(here) as entries:
            found = [(entry.path, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_link, is_folder in found:
            if is_link:
                yield path
            elif is_folder:
                waiting.append(path)
