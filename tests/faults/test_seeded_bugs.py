"""The suite notices the bugs that are put into it."""

from pathlib import Path

import pytest

from faults.seeded_bugs import BUGS, Bug, is_noticed

LONG = {
    "a batch is filled with stale groups",
    "a checkpoint drops more than it covers",
    "inserted groups of a batch that is regenerated wait to be sampled",
}
"""Those that take the model hundreds of sequences."""
CASES = [pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if bug.name in LONG else []) for bug in BUGS]


@pytest.mark.long
@pytest.mark.parametrize("bug", CASES)
def test_a_seeded_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
