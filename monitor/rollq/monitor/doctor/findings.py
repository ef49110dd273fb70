"""Findings of `rollq doctor`: their levels, their exit status, and the report as text or JSON."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import orjson

REPORT_VERSION = 1
"""Version of the JSON that `as_json` returns, which grows when a field is removed or changes its meaning."""
WIDTH = 88
"""Width in characters to which messages are wrapped. Commands are not wrapped, so they can be copied."""


class Level(StrEnum):
    """How much a finding matters, in ascending order."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or could not be read
    WARNING = "warning"  # works now, and causes a problem later
    ERROR = "error"  # does not work, or may lose or expose a run at any moment


EXIT_STATUS: Mapping[Level, int] = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 3, Level.ERROR: 1}
"""Exit status of the command by its worst finding. 2 means wrong settings or arguments, as for every command."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `commands` are shell lines that fix it, or that show more."""

    check: str
    level: Level
    message: str
    commands: tuple[str, ...] = ()


Report = Mapping[str, Sequence[Finding]]
"""Findings by subject: a server's address, or this machine."""


def worst_level(report: Report) -> Level:
    """The highest level in the report."""
    levels = list(Level)
    return max((finding.level for findings in report.values() for finding in findings), key=levels.index)


def as_json(report: Report) -> str:
    """One JSON object: `schema`, the worst `level`, and a list of `findings`, each with its `subject`."""
    findings = [
        {"subject": subject, **asdict(finding)} for subject, of_subject in report.items() for finding in of_subject
    ]
    whole = {"schema": REPORT_VERSION, "level": worst_level(report), "findings": findings}
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode()


def as_text(report: Report) -> str:
    """The report for a terminal: a heading per subject, a few short lines per finding, and the counts."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    for subject, findings in report.items():
        yield subject
        for finding in findings:
            yield from _finding_lines(finding)
        yield ""
    counts = Counter(finding.level for findings in report.values() for finding in findings)
    yield ", ".join(_counted(counts[level], level) for level in reversed(Level) if counts[level])


def _counted(number: int, level: Level) -> str:
    return f"{number} {level}{'s' if number > 1 and level is not Level.OK else ''}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    start = f"  {finding.level:<8} {finding.check:<12} "
    yield from textwrap.wrap(
        start + finding.message,
        WIDTH,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for command in finding.commands:
        yield f"{' ' * len(start)}$ {command}"
