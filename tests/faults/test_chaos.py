"""A short run of chaos. `make chaos` runs long ones."""

from pathlib import Path

from faults.chaos import Scene, run_chaos


def test_no_promise_is_broken_while_every_role_and_the_server_break(tmp_path: Path) -> None:
    outcome = run_chaos(Scene(seed=5, faults=8, gap_s=0.1, longest_s=1.0), tmp_path)
    assert not outcome.violations, outcome.violations
