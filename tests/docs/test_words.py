"""Pages, docstrings, comments and messages are in plain English: the phrases to avoid, and what to write instead."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    # habits of translated syntax
    r"\balso (where|if|when|while|those|for|of|in|on|by|with|from|at)\b": "even where, including",
    r", also\b": "including, too",
    r"\bin the mean\b": "on average",
    r"\bof which\b": "a second sentence",
    r"\b(that|those) of\b": "the noun again",
    r"\b(anew|meanwhile|besides|whatever|mends?|mended|mending)\b": "again, while, beside, what, fix",
    r"\bno more\b(?! than)": "no longer, stop",
    r"\b(is|are|was|were) away\b": "unavailable, unreachable, outside",
    r"[.](?!\n\n#) What (?![^?\0]*\?)": "a noun as the subject",
    # dictionary words that no native writer picks here
    r"\b(in vain|in earnest|for want of)\b": "needlessly, in practice, for lack of",
    r"\bbut for\b(?! (a|the) (day|week|hour|minute|second|moment))": "except",
    r"\b(something else|otherwise) than\b": "something other than, differently from",
    r"\b(is|are|was|were) started again\b": "is restarted",
    r"\bkept to look at\b": "kept for inspection",
    r"\b(is|are) not to be had\b": "is unavailable",
    r"; needed (is|are)\b": "expected",
    r"\bhas gone since\b": "is gone",
    r"(?<!exited\s)\bby (itself|themselves)\b": "automatically, alone, nothing",
    r"\bone after the other\b": "one after another",
    r"\b(is|are) what\b": "the noun",
    r"\bfor people\b": "for display, readable",
    r"\b(another|others) than\b": "a different one, other than",
    r"\b(must be|expected) (a text|texts)\b": "a string",
    r"\blists? of texts\b": "list of strings",
    r"\bof (yours|ours)\b": "custom, your, rollq's",
    r"\b(initial|present|current) ones?\b": "the noun again",
}
"""Pattern, matched in any case with any white space for a space -> what to write instead."""

ALLOWED: dict[tuple[str, str], str] = {}
"""(file, phrase) -> why it may stay."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SHIPPED = ("buffer", "producer", "workers", "consumer", "monitor", "environments", "cli", "integrations")
SOURCES = sorted(
    path
    for folder in (*SHIPPED, "benchmarks", "docs", "examples", "compose")
    for suffix in ("*.py", "*.lua", "*.toml", "*.yaml", "*.sh")
    for path in (ROOT / folder).rglob(suffix)
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def problems(text: str, first_line: int = 1) -> list[tuple[int, str]]:
    """Line and phrase of everything to avoid in `text`."""
    text = re.sub(r"`[\w.]+`", lambda name: "`" * len(name[0]), text)  # names are not prose
    hits = []
    for pattern, instead in AVOID.items():
        for match in re.finditer(pattern.replace(" ", r"[\s#]+"), text, re.IGNORECASE):
            phrase = " ".join(match[0].replace("#", " ").split()).lower()
            hits.append((first_line + text[: match.start()].count("\n"), f"{phrase!r}: write {instead}"))
    return hits


def prose(source: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """First line and text of each string and each block of comments in Python code."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    if "#" not in source:
        return
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            block.append(token.string)
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) and block:
            yield token.start[0] - len(block), "\n".join(block)
            block = []


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """First line and text of each docstring, and of each string after a constant."""
    for node in nodes:
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def problems_of(path: Path) -> list[str]:
    """Everything to avoid in a file, as `line: 'phrase': write ...`."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        hits = problems(re.sub(r"^( *)--", r"\1  ", text, flags=re.MULTILINE))
    else:
        nodes = list(ast.walk(ast.parse(text)))
        parts = list(prose(text, nodes))
        hits = []
        if problems("\0".join(part for _, part in parts)):  # one search of all parts, since most files have none
            hits = [hit for line, part in parts for hit in problems(part, line)]
        hits += [
            (line, "'What' starts a docstring: write a noun or a verb")
            for line, part in docstrings(nodes)
            if re.match(r"\s*What\b", part)
        ]
    allowed = [phrase for file, phrase in ALLOWED if file == name_of(path)]
    return [f"{line}: {hit}" for line, hit in sorted(hits) if not any(f"'{phrase}'" in hit for phrase in allowed)]


def test_every_file_is_in_plain_english() -> None:
    assert {name_of(path): found for path in (*PAGES, *SOURCES) if (found := problems_of(path))} == {}


def test_the_check_finds_what_it_looks_for() -> None:
    text = "It\ngoes\n# on, for ever.\nThere is no end. It is no longer told."
    assert [line for line, _ in sorted(problems(text))] == [2, 3, 4]
