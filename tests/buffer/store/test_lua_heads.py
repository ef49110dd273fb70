"""The head of every Lua function: six lines in a fixed form, which agree with the code below them and with Python."""

import ast
import re
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

import pytest

import rollq.buffer
from rollq.buffer.store import library

PACKAGE = Path(rollq.buffer.__file__).parent
FUNCTIONS = {path.stem: path for kind in library.KINDS for path in (PACKAGE / "lua" / kind).glob("*.lua")}
COMMON = tuple((PACKAGE / "lua" / "common").glob("*.lua"))
LABELS = ["Moves", "KEYS", "ARGV", "Returns", "Caller", "Repeat"]
MOST_LINES = 40


def of_kind(kind: str) -> list[str]:
    """The functions that act on one kind of thing."""
    return [name for name, path in FUNCTIONS.items() if path.parent.name == kind]


def head_of(name: str) -> dict[str, list[str]]:
    """The labelled lines of a head, each with the lines that continue it."""
    comment = FUNCTIONS[name].read_text().partition("\nlocal ")[0]
    found: dict[str, list[str]] = {}
    for line in comment.splitlines():
        match = re.match(r"-- ([A-Z]\w+): (\S.*)", line)
        if match:
            found[match[1]] = [match[2]]
        elif line.startswith("--   ") and found:
            found[list(found)[-1]].append(line.removeprefix("--   "))
    return found


def arguments_of(name: str) -> tuple[list[str], list[str]]:
    """The arguments in a head, and those that repeat ("then per group: ..."). Lines that explain one are left out."""
    first, *others = head_of(name)["ARGV"]
    listed = takewhile(lambda line: not re.match(r"[\w, ]+: |each ", line), others)
    fixed, _, repeated = " ".join([first, *listed]).partition(", then ")
    return fixed.split(", "), repeated.partition(": ")[2].split(", ") if repeated.startswith("per ") else []


def unpacked(name: str) -> list[list[str]]:
    """The names of every `local a, b = unpack(args...)`, those of the function itself first; with those in the file of
    common functions that two functions share for their arguments."""
    source = FUNCTIONS[name].read_text()
    if "keep_parts(clock, args)" in source:
        source = (PACKAGE / "lua" / "common" / "parts.lua").read_text() + source
    before, _, body = source.partition(f"local function {name}(keys, args)\n")
    pattern = r"local ([\w,\s]+?)\s*=\s*unpack\(args\b"
    return [re.split(r",\s*", names) for names in re.findall(pattern, body) + re.findall(pattern, before)]


def callers() -> dict[str, set[str]]:
    """Name of a function -> the methods and functions in Python that call it by name."""
    found: dict[str, set[str]] = defaultdict(set)

    def visit(node: ast.AST, scope: tuple[str, ...], in_function: bool = False) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                visit(child, (*scope, child.name), isinstance(child, ast.FunctionDef))
                continue
            if in_function and isinstance(child, ast.Constant) and child.value in FUNCTIONS:
                found[str(child.value)].add(".".join(scope))
            visit(child, scope, in_function)

    for path in PACKAGE.rglob("*.py"):
        visit(ast.parse(path.read_text()), ())
    return found


def test_a_head_has_a_sentence_and_six_lines() -> None:
    assert [name for name, path in FUNCTIONS.items() if not re.match(r"-- [A-Z].*", path.read_text())] == []
    assert {name: labels for name in FUNCTIONS if (labels := list(head_of(name))) != LABELS} == {}


@pytest.mark.parametrize("kind", library.KINDS)
def test_the_arguments_of_a_head_are_those_that_the_function_names(kind: str) -> None:
    for name in of_kind(kind):
        fixed, repeated = arguments_of(name)
        first, *others = unpacked(name) or [["none"]]
        assert first == fixed, name
        assert not repeated or repeated in others, name


@pytest.mark.parametrize("kind", library.KINDS)
def test_the_key_of_a_head_is_the_one_that_the_function_reads(kind: str) -> None:
    for name in of_kind(kind):
        (keys,), source = head_of(name)["KEYS"], FUNCTIONS[name].read_text()
        key, *others = keys.split(", ")
        assert key in ("clock", "run", "clock or run"), name
        assert others == (["payloads"] if name in library.TAKE_PAYLOADS else []), name
        if key != "clock or run":
            assert key == ("run" if re.search(r"read_run|local run = keys\[1\]", source) else "clock"), name


def test_the_caller_of_a_head_calls_the_function() -> None:
    found = callers()
    named = {name: head_of(name)["Caller"][0].partition(";")[0] for name in FUNCTIONS}
    assert {name: caller for name, caller in named.items() if caller not in found[name]} == {}


def test_no_function_takes_arguments_by_number() -> None:
    sources = {name: path.read_text() for name, path in FUNCTIONS.items()}
    assert [name for name, source in sources.items() if re.search(r"(?:args|group)\[\d+\]", source)] == []
    assert [name for name, source in sources.items() if source.count("keys[1]") != 1] == []


def test_no_lua_function_is_long() -> None:
    texts = [path.read_text() for path in (*FUNCTIONS.values(), *COMMON)]
    bodies = [body for text in texts for body in re.findall(r"^local function.*?^end", text, re.DOTALL | re.MULTILINE)]
    assert [body.splitlines()[0] for body in bodies if body.count("\n") >= MOST_LINES] == []


def test_every_lua_file_is_part_of_the_library() -> None:
    source = library.library_source()
    paths = list(PACKAGE.glob("lua/**/*.lua"))
    assert len(paths) == len(FUNCTIONS) + len(library.COMMON)
    assert all(path.read_text() in source for path in paths)
