"""Removes unsafe links that a command left in its workspace, before its work is read.

Links are judged by their text and never followed. Since every link in a workspace is checked, the remaining links lead
only through other remaining links. The time does not depend on the length of link chains.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollq.buffer.common.removing import remove_folder

LONGEST: Final = 2_000
"""The most bytes in a path below a workspace: with the workspace's path, it stays within the system's limit."""


def remove_links(workspace: Path, stays: Callable[[str | None], bool]) -> int:
    """Remove links whose `target` fails the test `stays`, and folders whose path is too long. Returns the number
    removed."""
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
    """The target of a link in `folder`, which is `root` or below it, if no other link is on the way.

    None if `..` leads above `root`, or follows a name: then the target depends on the root's location or on other
    links.
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
    """Whether a path is one of the folders or inside a folder."""
    return f"{path}/".startswith(tuple(f"{folder}/" for folder in folders))


def _links_and_deep_folders(root: str) -> Iterator[str]:
    """The paths of links below a folder, and of folders too deep to be searched."""
    waiting = [root]
    while waiting:
        here = waiting.pop()
        if len(os.fsencode(here)) - len(os.fsencode(root)) > LONGEST:
            yield here
            continue
        with suppress(OSError):  # a folder of another user, which nobody else can enter
            os.chmod(here, os.lstat(here).st_mode & 0o7777 | 0o700)
        with os.scandir(here) as entries:
            found = [(entry.path, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_link, is_folder in found:
            if is_link:
                yield path
            elif is_folder:
                waiting.append(path)
