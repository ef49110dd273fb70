"""Removes folders, however deep, that untrusted programs have filled. Standard library only."""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path


def remove_folder(folder: Path | str) -> None:
    """Remove a folder and its contents, as far as this user may. No program in the folder may still be running.

    Deep folders are moved to the top before they are emptied, so that calls do not nest and paths stay short.
    """
    top, number = str(folder), count()
    mark = f"{top}/.{os.urandom(8).hex()}"
    waiting = [top]
    if not os.path.islink(top):
        with suppress(OSError):
            os.chmod(top, 0o700)
    while waiting:
        here = waiting.pop()
        for path, is_folder in _entries(here):
            with suppress(OSError):
                if not is_folder:
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                if here != top:
                    moved = f"{mark}-{next(number)}"
                    os.rename(path, moved)
                    path = moved
                waiting.append(path)
        if here != top:
            with suppress(OSError):
                os.rmdir(here)
    with suppress(OSError):
        os.rmdir(top)


def _entries(folder: str) -> list[tuple[str, bool]]:
    """The paths in a folder, and whether each is a folder; empty for a link or an unreadable folder."""
    if os.path.islink(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []
