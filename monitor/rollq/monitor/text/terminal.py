"""Makes models' and users' text unable to control a terminal. Widths are display widths. Pure."""

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size

TAB = "    "


def escaped(text: str) -> str:
    r"""`text` with visible escapes (`\x1b`, `\u202e`) for every character that could act on a terminal: control and
    format characters, surrogates, and line separators. Line feeds stay, and tabs become spaces."""
    return "".join(map(_escaped, text))


def one_line(text: str) -> str:
    """`text` escaped, in one line, with single spaces."""
    return escaped(" ".join(text.split()))


def cut(text: str, cells: int) -> str:
    """`text`, one line, shortened with "..." to at most `cells` columns of a terminal, at least 3."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 3).rstrip() + "..."


def wrapped(text: str, cells: int) -> Iterator[str]:
    """The lines of an escaped text, broken where they would be wider than `cells` columns."""
    for line in text.split("\n"):
        while cell_len(line) > cells:
            head, line = _split(line, cells)
            yield head
        yield line


def _split(line: str, cells: int) -> tuple[str, str]:
    width = 0
    for at, character in enumerate(line):
        width += cell_len(character)
        if width > cells:
            space = line.rfind(" ", 1, at)
            end = space if space > at // 2 else max(at, 1)
            return line[:end], line[end:].removeprefix(" ")
    return line, ""


def _escaped(character: str) -> str:
    if character in "\n ":
        return character
    if character == "\t":
        return TAB
    if unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp"):
        return character.encode("unicode_escape", "surrogatepass").decode()
    return character
