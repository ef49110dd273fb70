"""The part of the site's navigation that comes from docs/guide/README.md: its headings, and the pages below each."""

import re
from pathlib import Path
from typing import Any

from rollq_docs.markdown import sections

INDEX = "guide/README.md"
TUTORIALS = "Tutorials"
"""Heading whose pages have a place of the same name in the navigation."""
PAGE = re.compile(r"\[([^\]]+)\]\(([\w-]+\.md)\)")


def groups(index: str) -> dict[str, list[dict[str, str]]]:
    """Heading -> pages of the guide, as entries of `nav`. A page counts where it is linked first below a heading."""
    found: dict[str, list[dict[str, str]]] = {}
    seen = set()
    for heading, text in list(sections(index).items())[1:]:
        for title, name in PAGE.findall(text):
            if name not in seen:
                seen.add(name)
                found.setdefault(heading, []).append({" ".join(title.split()): f"guide/{name}"})
    return found


def add_guide(nav: list[dict[str, Any]], docs: Path) -> None:
    """Add the pages of the guide to `nav`, apart from those that are there already."""
    there = _pages(nav)
    found = {
        heading: [entry for entry in entries if not set(entry.values()) & there]
        for heading, entries in groups((docs / INDEX).read_text("utf-8")).items()
    }
    part(nav, TUTORIALS).extend(found.pop(TUTORIALS))
    part(nav, "Guides").extend({heading: entries} for heading, entries in found.items() if entries)


def part(nav: list[dict[str, Any]], title: str) -> list[Any]:
    """The entries of a part of `nav`."""
    (found,) = [entry[title] for entry in nav if title in entry]
    entries: list[Any] = found
    return entries


def _pages(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(_pages, nav.values() if isinstance(nav, dict) else nav))
