"""`make conformance`: runs the tests of every line of docs/conformance.md, and prints the table with their outcome.

Usage: python tests/conformance.py [arguments for pytest]
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
LINES = ROOT / "docs" / "conformance.md"


def lines() -> dict[str, str]:
    """Id -> behaviour, as the page has them."""
    return dict(re.findall(r"^\| ([A-Z]{2}\d\d) \| (.+) \|$", LINES.read_text("utf-8"), re.MULTILINE))


def ids_in(name: str) -> set[str]:
    """Ids of the lines that a test covers by its name."""
    return {found.upper() for found in re.findall(r"(?<=_)[a-z]{2}\d\d(?=_)", name)}


def outcomes(report: Path) -> dict[str, list[bool]]:
    """Id -> whether each of its tests passed, from a JUnit report."""
    found: dict[str, list[bool]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
        for line in ids_in(case.get("name", "")):
            found.setdefault(line, []).append(not bad)
    return found


def table(known: Mapping[str, str], found: Mapping[str, Sequence[bool]]) -> list[str]:
    """One row per line: id, outcome, tests, behaviour."""
    rows = []
    for line, behaviour in known.items():
        passed = found.get(line, ())
        word = "missing" if not passed else "pass" if all(passed) else "FAILED"
        rows.append(f"{line}  {word:7}  {sum(passed):3}/{len(passed):<3}  {behaviour}")
    return rows


def main(arguments: Sequence[str]) -> int:
    known = lines()
    chosen = " or ".join(f"_{line.lower()}_" for line in known)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists():
            return status
        rows = table(known, outcomes(report))
    print("\n".join(rows))
    passed = sum("  pass  " in row for row in rows)
    print(f"{passed} of {len(rows)} lines pass")
    return 0 if passed == len(rows) and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
