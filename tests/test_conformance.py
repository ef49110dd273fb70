"""Every line of docs/conformance.md has a test that carries its id."""

import re
from pathlib import Path

from conformance import ids_in, lines, table

TESTS = Path(__file__).parent


def test_every_line_has_a_test() -> None:
    texts = [path.read_text("utf-8") for path in TESTS.rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    covered = {line for name in names for line in ids_in(name)}
    assert set(lines()) == covered, {"missing": set(lines()) - covered, "unknown": covered - set(lines())}


def test_a_line_passes_when_it_has_tests_and_all_of_them_pass() -> None:
    known = {"XB01": "one", "XB02": "two", "XB03": "three"}
    rows = table(known, {"XB01": [True, True], "XB02": [True, False]})
    assert [row.split()[1] for row in rows] == ["pass", "FAILED", "missing"]


def test_names_tell_their_lines() -> None:
    assert ids_in("test_xs01_xp04_which_pools") == {"XS01", "XP04"}
    assert ids_in("test_utf8_is_fine") == set()
