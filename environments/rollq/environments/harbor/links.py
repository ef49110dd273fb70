"""Removes links that lead out of a workspace, before anybody looks at what an agent has left there."""

import os
from pathlib import Path
from typing import Final

PROGRAMS: Final = "/usr/"
"""Links there stay, as virtual environments have them: nobody's work or answers are in this folder."""
OUTSIDE: Final = "/"
MOST_PARTS: Final = 4_000
"""Names in a path and the links on it, beyond which it is a circle."""


def remove_links_out(workspace: Path, place: str) -> int:
    """Remove links that lead neither into the workspace nor to programs; returns how many. `place` is where the agent
    saw its workspace."""
    root, removed = os.path.realpath(workspace), 0
    for folder, folders, files in os.walk(root):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(path) and not f"{target(path, root, place)}/".startswith((f"{root}/", PROGRAMS)):
                os.unlink(path)
                removed += 1
    return removed


def target(path: str, root: str, place: str) -> str:
    """The path that a link in `root` leads to, as a process sees it that has `root` at `place` too."""
    rest, here = path.split("/")[::-1], ""
    for _ in range(MOST_PARTS):
        if not rest:
            return here
        name = rest.pop()
        if name == "..":
            if here == root:  # above is another folder at `place` than here
                return OUTSIDE
            here = os.path.dirname(here)
        elif name not in ("", "."):
            here = root if f"{here}/{name}" == place else f"{here}/{name}"
            if os.path.islink(here):
                link = os.readlink(here)
                rest += link.split("/")[::-1]
                here = "" if link.startswith("/") else os.path.dirname(here)
    return OUTSIDE
