"""Pages are written in plain English: the phrases to avoid, and what to write instead."""

import re
from pathlib import Path

import pytest

from support.documented_commands import ROOT

AVOID = {
    r"(?<!there\s)\b(is|are|was|were) no (?!longer|more|less|fewer)": "is not a, is not one",
    r"\bthat (is|are) none\b": "that is not one",
    r"\b(tell|tells|telling|told)\b": "report, log, return, say",
    r"\b(stand|stands|standing|stood)\b": "is, is in, is listed",
    r"\bwhoever\b": "the caller, a worker that",
    r"\bso (many|long|often)\b": "at most N, for N seconds, N times",
    r"\bfor ever\b": "indefinitely, permanently",
    r"\bof (its|their|your|our|my|his|one's) own\b": "separate, custom, new",
    r"\b(become|becomes|became|come|comes|came) of\b": "outcome, result",
    r"\b(come|comes|came) to nothing\b": "fail",
    r"\b(go|goes|going|gone|went) on\b": "continue, resume",
    r"\bbegun\b": "started",
}
"""Pattern, matched in any case with any white space for a space -> what to write instead."""

ALLOWED: dict[tuple[str, str], str] = {}
"""(file, phrase) -> why it may stay."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def found_in(text: str) -> list[tuple[int, str]]:
    """Line and phrase of everything to avoid."""
    hits = []
    for pattern, instead in AVOID.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            phrase = " ".join(match[0].split())
            hits.append((text[: match.start()].count("\n") + 1, f"{phrase!r}: write {instead}"))
    return sorted(hits)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert found_in(page.read_text("utf-8")) == []


def test_the_check_finds_what_it_looks_for() -> None:
    text = "It\ngoes\non, for ever.\nThere is no end. It is no longer told."
    assert [line for line, _ in found_in(text)] == [2, 3, 4]
