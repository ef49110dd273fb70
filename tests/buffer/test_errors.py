"""The tree in the docstring of `rollq.buffer.errors` lists every error of rollq under its parent."""

import ast
import re
from functools import cache
from pathlib import Path

from rollq.buffer import errors

ROOT = Path(__file__).parents[2]
SOURCES = [path for part in ROOT.glob("*/rollq") for path in part.rglob("*.py")]


@cache
def classes() -> dict[str, tuple[list[str], str]]:
    """The bases and the docstring of all public classes of all packages, by name; read from the source, since some
    modules need torch."""
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return {
        node.name: ([ast.unparse(base) for base in node.bases], ast.get_docstring(node) or "")
        for node in nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def parents() -> dict[str, str]:
    """Every error that descends from `RollqError`, and its parent among them."""
    bases = {name: bases for name, (bases, _) in classes().items()}
    found: dict[str, str] = {}
    rest = {"RollqError"}
    while rest:
        children = {name: base for name in bases for base in bases[name] if base in rest}
        found |= children
        rest = set(children)
    return found


def documented() -> dict[str, str]:
    """The tree of the docstring: every error and its parent."""
    above: list[str] = []
    found: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.fullmatch(r"((?: +\|)*)(?: *- *)?(\w+)( .*)?", line):
            depth = match[1].count("|")
            if depth or match[2] == "RollqError":
                above[depth:] = [match[2]]
                found |= {match[2]: above[depth - 1]} if depth else {}
    return found


def test_the_docstring_lists_every_error_under_its_parent() -> None:
    assert documented() == parents()


def test_every_error_has_a_docstring_of_whole_sentences() -> None:
    known = classes()
    docstrings = {name: known[name][1] for name in parents()}
    assert [name for name, text in docstrings.items() if not (text[:1].isupper() and text.endswith("."))] == []
