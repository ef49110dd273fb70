"""The suite notices the bugs that are put into it."""

from pathlib import Path

import pytest

from faults.seeded_bugs import BUGS, Bug, is_noticed


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_seeded_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
