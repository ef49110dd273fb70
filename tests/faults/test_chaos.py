"""Short runs of chaos and of a failover. `make chaos` and `python -m faults failover` are the long ones."""

from pathlib import Path

import pytest

from faults.chaos import Scene, run_chaos
from faults.plan import CALM, make_failover_plan
from faults.processes import LENDING


def test_no_promise_is_broken_while_every_role_and_the_server_break(tmp_path: Path) -> None:
    outcome = run_chaos(Scene(seed=5, faults=8, gap_s=0.1, longest_s=1.0), tmp_path)
    assert not outcome.violations, outcome.violations


@pytest.mark.long
def test_no_promise_is_broken_while_workers_that_lend_samples_to_each_other_break(tmp_path: Path) -> None:
    outcome = run_chaos(Scene(seed=1, faults=6, gap_s=0.5, longest_s=1.0, load=LENDING), tmp_path)
    assert not outcome.violations, outcome.violations
    assert outcome.lent > 0


@pytest.mark.slow  # chaos of all roles and the server stays
def test_a_failover_to_a_replica_that_has_everything_breaks_no_promise(tmp_path: Path) -> None:
    plan = make_failover_plan(1, every_s=3.0, behind_s=0.0)
    outcome = run_chaos(Scene(seed=0, faults=0, odds=CALM, plan=plan, modes=("replay",)), tmp_path)
    assert outcome.done["failover"] == 1
    assert not outcome.violations, outcome.violations


@pytest.mark.slow  # likewise
def test_no_promise_is_broken_while_nodes_of_a_cluster_break(tmp_path: Path) -> None:
    outcome = run_chaos(Scene(seed=3, faults=6, gap_s=0.2, longest_s=4.0, cluster=True), tmp_path)
    assert not outcome.violations, outcome.violations
