"""Links of pages, rewritten for the site.

Pages link to files by their place in the repository, so that the links work on GitHub. On the site, a page in docs/
keeps its place, some pages outside of docs/ get another one, and any other file that a page links to is shown on a page
in source/.
"""

import posixpath
import re
from collections.abc import Callable

MOVED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Place in the repository -> page of the site."""
HOME = ("", "Fits with", "When not to use it", "Read on")
"""Sections of README.md that the home page shows."""
QUICK_START = "quick-start.md"
"""The page that shows the others."""
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?:#([^)\s]*))?(?=\))")
"""The target of a link to a file, and its anchor."""


def page_of(path: str, anchor: str = "") -> str:
    """The page of the site that shows a file of the repository, or the part of it that has an anchor."""
    if path == "README.md" and anchor not in {name.lower().replace(" ", "-") for name in HOME}:
        return QUICK_START
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return MOVED.get(path) or f"source/{path.removesuffix('.md')}.md"


def linked(text: str, origin: str) -> list[str]:
    """The files of the repository to which the page at `origin` links."""
    found = []

    def note(target: str, anchor: str) -> str:
        found.append(_resolve(origin, target))
        return target

    _replace(text, note)
    return found


def rewritten(text: str, origin: str, page: str) -> str:
    """The text of the file at `origin`, with links as they must be on `page` of the site."""

    def link(target: str, anchor: str) -> str:
        return posixpath.relpath(page_of(_resolve(origin, target), anchor), posixpath.dirname(page) or ".")

    return _replace(text, link)


def _resolve(origin: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _replace(text: str, new_target: Callable[[str, str], str]) -> str:
    """The text with the targets of its links replaced, but not in code."""

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match.groups("")
        return new_target(target, anchor) + (f"#{anchor}" if anchor else "")

    parts, start = [], 0
    for block in [*CODE.finditer(text), None]:
        end = block.start() if block else len(text)
        parts.append(LINK.sub(replaced, text[start:end]))
        if block:
            parts.append(block[0])
            start = block.end()
    return "".join(parts)
