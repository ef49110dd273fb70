"""Breaks the Lua functions that decide, one small change at a time, and counts what their tests notice.

A mutant is the library with one operator, number or condition changed, or one statement dropped. Its tests are those
that call the function, or all tests for a file in `common/`. They run on a real server, which every process has for
itself: tests are collected once, and each mutant's library is loaded before they run.

Usage: python tests/lua_mutants.py [part of a file's path] [--sample N]
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from threading import Timer
from typing import Any

import orjson
import pytest
import redis
from _pytest.runner import runtestprotocol

import rollq.buffer
from rollq.buffer.store import library, redis_functions
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.pipelining import Command

ROOT = Path(__file__).parent.parent
LUA = Path(rollq.buffer.__file__).parent / "lua"
FILES = (
    "common/clock", "common/groups", "common/samples", "group/admit", "group/expire", "group/lease", "group/put",
    "group/reap", "group/recycle", "step/claim", "step/plan", "step/release", "step/rewind",
)  # fmt: skip
"""The files that decide."""
ROLES = (
    "functions", "admission", "leasing", "staleness", "claiming", "training", "runs", "reuse", "schedule", "stragglers",
    "control", "batches", "prompt_stats",
)  # fmt: skip
TESTS = (*(f"tests/buffer/test_{role}.py" for role in ROLES), "tests/buffer/snapshots/test_holding.py")
QUICK_S = 2.0
"""Tests that take longer are left out."""
ENOUGH = 0.9
SEED = 1
PROCESSES = 2
LIMIT_S = 10.0
"""For one test; a mutant that loops is noticed by it."""

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "~=", "~=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "and": "or", "or": "and", "not": "", "true": "false", "false": "true",
}  # fmt: skip
TOKEN = re.compile(
    r"(?P<skip>--[^\n]*|\s+)|(?P<text>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<sign>==|~=|<=|>=|\.\.\.|\.\.|[-+*/<>=#(){}\[\],;:.%^])"
)
NO_STATEMENTS = {
    "local", "if", "elseif", "else", "for", "while", "repeat", "until", "end", "return", "function", "do"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with the text from `begin` to `end` replaced by `text`."""

    file: str
    begin: int
    end: int
    text: str

    def source(self) -> str:
        original = (LUA / f"{self.file}.lua").read_text()
        return original[: self.begin] + self.text + original[self.end :]

    def __str__(self) -> str:
        original = (LUA / f"{self.file}.lua").read_text()
        number = original.count("\n", 0, self.begin) + 1
        after = self.source().splitlines()[number - 1].strip()
        before = original.splitlines()[number - 1].strip()
        return f"{self.file}.lua:{number}\n  - {before}\n  + {after}"


def tokens_of(source: str) -> list[Token]:
    """The tokens of Lua source, without comments and error messages."""
    found = [
        Token(str(match.lastgroup), match[0], match.start(), match.end())
        for match in TOKEN.finditer(source)
        if match.lastgroup != "skip"
    ]
    messages = [range(i, closing(found, i + 1)) for i, token in enumerate(found) if token.text == "fail"]
    return [token for i, token in enumerate(found) if not any(i in message for message in messages)]


def closing(tokens: Sequence[Token], opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index].text in ("(", "{", "[")) - (tokens[index].text in (")", "}", "]"))
        if depth == 0:
            return index
    raise ValueError("a bracket is not closed")


def mutants_of(file: str) -> list[Mutant]:
    """Every mutant of one file."""
    source = (LUA / f"{file}.lua").read_text()
    tokens = tokens_of(source)
    changes = {*changed_tokens(tokens), *negated_conditions(source, tokens), *dropped_statements(source, tokens)}
    return [Mutant(file, *change) for change in sorted(changes)]


Change = tuple[int, int, str]
"""Begin, end, and the text between them."""


def changed_tokens(tokens: Sequence[Token]) -> Iterator[Change]:
    for before, token in pairwise(tokens):
        if token.kind == "number":
            yield token.begin, token.end, f"({token.text} + 1)"
        elif token.text == "-" and is_operator(before):
            yield token.begin, token.end, ""  # the sign of a number
        elif token.kind != "text" and token.text in SWAPS:
            yield token.begin, token.end, SWAPS[token.text]


def is_operator(token: Token) -> bool:
    """Whether a value follows this token, so that a minus after it is a sign."""
    return token.text in ("return", "and", "or") or (token.kind == "sign" and token.text not in (")", "]", "}"))


def negated_conditions(source: str, tokens: Sequence[Token]) -> Iterator[Change]:
    for index, token in enumerate(tokens):
        if token.text in ("if", "elseif"):
            condition = [other.text for other in takewhile(lambda other: other.text != "then", tokens[index + 1 :])]
            if not {"==", "~="} & set(condition) or {"and", "or"} & set(condition):  # else it is swapped already
                end = tokens[index + 1 + len(condition)].begin
                yield token.end, end, f" not ({source[token.end : end].strip()}) "


def dropped_statements(source: str, tokens: Sequence[Token]) -> Iterator[Change]:
    """Assignments and calls that begin a line or a block, but no declarations and no returns."""
    for index, (before, token) in enumerate(pairwise(tokens), 1):
        begins = "\n" in source[before.end : token.begin] or before.text in ("then", "else", "do")
        if token.kind != "word" or token.text in NO_STATEMENTS or not begins:
            continue
        if before.kind == "sign" and before.text not in (")", "]", "}"):
            continue  # it continues an expression or a table
        end = statement_end(source, tokens, index)
        if end is not None:
            yield token.begin, end, ""


def statement_end(source: str, tokens: Sequence[Token], index: int) -> int | None:
    """Where the assignment or call that begins at `index` ends; None for what is neither."""
    at, is_statement = index, tokens[index].text == "break"
    while at < len(tokens):
        if tokens[at].text in ("(", "{", "["):
            is_statement |= tokens[at].text == "("
            at = closing(tokens, at)
        is_statement |= tokens[at].text == "="
        if at + 1 == len(tokens) or tokens[at + 1].text == "end":
            break
        gap, following = source[tokens[at].end : tokens[at + 1].begin], tokens[at + 1]
        if "\n" in gap and following.kind == "word" and following.text not in ("and", "or"):
            break
        at += 1
    return tokens[at].end if is_statement else None


class MutantRun:
    """A pytest plugin that runs the collected tests once without a change, and then against each mutant."""

    def __init__(self, mutants: Sequence[Mutant], output: Path) -> None:
        self._mutants = mutants
        self._output = output
        self._calls: dict[str, set[str]] = {}
        self._seconds: dict[str, float] = {}
        self._server: EmbeddedServer | None = None
        self._clean = library.library_source()
        self._patch = pytest.MonkeyPatch()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        result = yield
        if fixturedef.argname == "shared_server":
            self._server = result
        return result

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if "fresh_server" not in fixtures_of(item)]
        self._learn(session, items)
        for mutant in self._mutants:
            killer = self._killer(session, items, mutant)
            if killer is not None:  # it is likely to notice the next mutant too
                items.remove(killer)
                items.insert(0, killer)
            with self._output.open("ab") as file:
                file.write(orjson.dumps([self._mutants.index(mutant), killer and killer.nodeid]) + b"\n")
        return True

    def _learn(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Run every test without a change, to learn which functions it calls."""
        fcall = redis_functions._fcall
        for item in items:
            called: set[str] = set()

            def record(call: Command, *more_keys: str, called: set[str] = called) -> Command:
                called.add(call[0])
                return fcall(call, *more_keys)

            self._patch.setattr(redis_functions, "_fcall", record)
            assert self._passes(session, item), f"{item.nodeid} fails without a change"
            self._calls[item.nodeid] = called
        self._patch.undo()
        items[:] = [item for item in items if self._seconds[item.nodeid] < QUICK_S]
        items.sort(key=lambda item: self._seconds[item.nodeid])

    def _killer(self, session: pytest.Session, items: Sequence[pytest.Item], mutant: Mutant) -> pytest.Item | None:
        """The first test that notices the mutant."""
        assert self._server is not None
        with redis.Redis.from_url(self._server.url) as client:
            client.flushall()
            client.function_flush()
        original = (LUA / f"{mutant.file}.lua").read_text()
        source = self._clean.replace(original, mutant.source())
        self._patch.setattr(redis_functions, "library_source", lambda: source)
        kind, _, name = mutant.file.partition("/")
        concerned = (item for item in items if kind == "common" or name in self._calls[item.nodeid])
        return next((item for item in concerned if not self._passes(session, item)), None)

    def _passes(self, session: pytest.Session, item: Any) -> bool:
        timer = Timer(LIMIT_S, self._restart)
        timer.start()
        try:
            item._initrequest()
            reports = runtestprotocol(item, log=False, nextitem=BackToSession(session))  # type: ignore[arg-type]
        finally:
            timer.cancel()
            timer.join()
        self._seconds[item.nodeid] = sum(report.duration for report in reports)
        return not any(report.failed for report in reports)

    def _restart(self) -> None:
        """End a function that loops: with its server, its data and its library."""
        server = self._server
        assert server is not None
        server.kill()
        for path in server.directory.iterdir():
            if path.name.startswith(("appendonly", "dump")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        server.start()


class BackToSession:
    """What runtestprotocol takes for the next test: all but the session is torn down before it."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


def fixtures_of(item: Any) -> Sequence[str]:
    """The names of a test's fixtures."""
    names: list[str] = item.fixturenames
    return names


def run(mutants: Sequence[Mutant]) -> dict[Mutant, str | None]:
    """The test that noticed each mutant, or None."""
    with tempfile.TemporaryDirectory() as name:
        parts = [mutants[i::PROCESSES] for i in range(PROCESSES)]
        running = []
        for i, part in enumerate(parts):
            folder = Path(name) / str(i)
            folder.mkdir()
            words = [[mutant.file, mutant.begin, mutant.end, mutant.text] for mutant in part]
            (folder / "mutants.json").write_bytes(orjson.dumps(words))
            command = [sys.executable, __file__, "--worker", str(folder)]
            with (folder / "log").open("wb") as log:
                running.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        found: dict[Mutant, str | None] = {}
        for i, (part, process) in enumerate(zip(parts, running, strict=True)):
            folder = Path(name) / str(i)
            if process.wait() != 0:
                raise RuntimeError((folder / "log").read_text()[-4000:])
            for line in (folder / "killers").read_bytes().splitlines():
                index, killer = orjson.loads(line)
                found[part[index]] = killer
    return found


def work(folder: Path) -> int:
    """One process's share of the mutants."""
    (folder / "killers").touch()
    mutants = [Mutant(*words) for words in orjson.loads((folder / "mutants.json").read_bytes())]
    arguments = ["-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "temp"), *TESTS]
    return int(pytest.main(arguments, plugins=[MutantRun(mutants, folder / "killers")]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", default="")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--worker", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        return work(chosen.worker)
    mutants = [mutant for file in FILES if chosen.file in file for mutant in mutants_of(file)]
    if chosen.sample is not None:
        mutants = random.Random(SEED).sample(mutants, min(chosen.sample, len(mutants)))
    killers = run(mutants)
    for mutant, killer in killers.items():
        if killer is None:
            print(mutant)
    return report(killers)


def report(killers: dict[Mutant, str | None]) -> int:
    """Print the share of mutants that was noticed, by file; 1 when it is too low for one of them."""
    enough = True
    for file in FILES:
        outcomes = [killer is not None for mutant, killer in killers.items() if mutant.file == file]
        if outcomes:
            share = sum(outcomes) / len(outcomes)
            enough &= share >= ENOUGH
            print(f"{share:6.1%} of {len(outcomes):4} mutants killed  {file}.lua")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
