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


CALLERS = callers()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_head_has_a_sentence_and_six_lines(name: str) -> None:
    assert re.match(r"-- [A-Z].*", FUNCTIONS[name].read_text())
    assert list(head_of(name)) == LABELS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_of_a_head_are_those_that_the_function_names(name: str) -> None:
    fixed, repeated = arguments_of(name)
    first, *others = unpacked(name) or [["none"]]
    assert first == fixed
    assert not repeated or repeated in others


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_key_of_a_head_is_the_one_that_the_function_reads(name: str) -> None:
    (keys,), source = head_of(name)["KEYS"], FUNCTIONS[name].read_text()
    key, *others = keys.split(", ")
    assert key in ("clock", "run", "clock or run")
    assert others == (["payloads"] if name in library.TAKE_PAYLOADS else [])
    if key != "clock or run":
        assert key == ("run" if re.search(r"read_run|local run = keys\[1\]", source) else "clock")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_caller_of_a_head_calls_the_function(name: str) -> None:
    caller, _, _ = head_of(name)["Caller"][0].partition(";")
    assert caller in CALLERS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_takes_arguments_by_number(name: str) -> None:
    source = FUNCTIONS[name].read_text()
    assert not re.findall(r"(?:args|group)\[\d+\]", source)
    assert source.count("keys[1]") == 1


@pytest.mark.parametrize("path", [*FUNCTIONS.values(), *COMMON], ids=lambda path: path.stem)
def test_no_lua_function_is_long(path: Path) -> None:
    for body in re.findall(r"^local function.*?^end", path.read_text(), re.DOTALL | re.MULTILINE):
        assert body.count("\n") < MOST_LINES, body.splitlines()[0]


def test_every_lua_file_is_part_of_the_library() -> None:
    source = library.library_source()
    paths = list(PACKAGE.glob("lua/**/*.lua"))
    assert len(paths) == len(FUNCTIONS) + len(library.COMMON)
    assert all(path.read_text() in source for path in paths)
