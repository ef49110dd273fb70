"""Markdown as text: tables, and pages by section."""

import re
from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Text for a cell of a table: on one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code in a cell: HTML in which nothing looks like Markdown, which has no escape for `|` there."""
    return f"<code>{''.join(f'&#{ord(sign)};' if sign in '&<>|[]_*`' else sign for sign in text)}</code>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are used as they are."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sections(page: str) -> dict[str, str]:
    """Heading -> text, with its heading, of each section of the second level; "" -> the text before the first."""
    first, *others = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return {"": first} | {text.partition("\n")[0].removeprefix("## "): text for text in others}
