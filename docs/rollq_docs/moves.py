"""The moves of groups between statuses, as the heads of the Redis functions list them."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import rollq.buffer
from rollq.buffer.store.library import KINDS
from rollq.buffer.values.rollouts import Status

LUA = Path(rollq.buffer.__file__).parent / "lua"
NEW, GONE = "new", "gone"
Move = tuple[str, str]
"""From and to: statuses, `NEW` or `GONE`."""
ENDS = {"new": NEW, "gone": GONE, "dropped": GONE}
"""Words for what is not a status."""
COPIES = {("archived", "cooling"), ("cooling", "completed"), ("cooling", GONE)}
"""Moves by `commit` of copies of trained groups, which its head leaves out; a copy starts where its original ends."""


@cache
def heads() -> dict[str, dict[str, str]]:
    """Function -> what its head says: `""` is the sentence before the labels."""
    paths = [path for kind in KINDS for path in sorted((LUA / kind).glob("*.lua"))]
    return {path.stem: _head(path.read_text("utf-8")) for path in paths}


@cache
def moves() -> dict[Move, tuple[str, ...]]:
    """Each move between two statuses, into one or out of all -> the functions that make it."""
    found: dict[Move, list[str]] = defaultdict(list)
    for name, head in heads().items():
        for move in sorted(_moves(head["Moves"])):
            found[move].append(name)
    for move in sorted(COPIES):
        found[move].append("commit")
    return {move: tuple(sorted(names)) for move, names in sorted(found.items())}


def _head(source: str) -> dict[str, str]:
    """The labelled lines of a head, each with the lines that continue it."""
    found, label = {"": ""}, ""
    for line in source.splitlines():
        if not line.startswith("--") or line == "--":
            break
        if match := re.match(r"-- ([A-Z]\w+): (.*)", line):
            label, line = match[1], f"-- {match[2]}"
            found[label] = ""
        found[label] = f"{found[label]} {line.removeprefix('--').strip()}".strip()
    return found


def _moves(text: str) -> set[Move]:
    """The moves of a line such as `a|b -> c, or dropped; d -> e`."""
    names = {status.value: status.value for status in Status} | ENDS
    sides = re.split(r"([\w|]+) -> ", text)
    return {
        (names[source], names[target])
        for sources, targets in zip(sides[1::2], sides[2::2], strict=True)
        for source in sources.split("|")
        for target in re.findall(r"\w+", targets)
        if source in names and target in names
    }
