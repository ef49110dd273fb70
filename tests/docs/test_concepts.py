"""docs/concepts: the tests and the words that its pages name exist."""

import re

from support.documented_commands import ROOT

FAILURES = ROOT / "docs" / "concepts" / "failures.md"
TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def words_of_code(folder: str) -> str:
    """The Python and Lua sources of a folder."""
    return "".join(path.read_text("utf-8") for end in ("py", "lua") for path in (ROOT / folder).rglob(f"*.{end}"))


def test_every_failure_names_tests_that_exist() -> None:
    text = FAILURES.read_text("utf-8")
    named = TEST.findall(text)
    assert len(named) >= 30
    missing = [name for name, path in named if f"def {name}(" not in (FAILURES.parent / path).read_text("utf-8")]
    assert missing == []
    sections = text.split("\n## ")[1:-1]
    assert [section.splitlines()[0] for section in sections if not TEST.search(section)] == []


def test_what_status_shows_is_what_it_says() -> None:
    text = FAILURES.read_text("utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ") and row.count(" | ") == 3]
    cells = [row.rstrip(" |").rpartition(" | ")[2] for row in rows if "noticed after" not in row]
    prose = re.findall(r"`rollq status` (?:shows|says|prints)[^.]*", text)
    quotes = {quote for part in [*cells, *prose] for quote in re.findall("`([^`]+)`", part)} - {"rollq status"}
    shown_in = "".join(map(words_of_code, ("monitor", "buffer", "workers", "cli", "tests/monitor", "tests/e2e")))
    assert len(quotes) >= 10
    shown = {quote: quote.removesuffix(": ").strip() for quote in quotes}
    assert [quote for quote, words in shown.items() if words not in shown_in] == []
