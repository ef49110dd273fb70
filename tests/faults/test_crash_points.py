"""Two crash points of every role. `make crashpoints` goes through all of them."""

from pathlib import Path

import pytest

from faults.crash_points import Scenario, crash_everywhere
from faults.scenarios import scenarios
from rollq.buffer.store.embedded_server import EmbeddedServer

CALLS = {
    "sweeper": 15,
    "producer": 70,
    "worker": 60,
    "trainer, rank 1, replay": 45,
    "lending, holder": 5,
    "lending, borrower": 4,
}
"""The call at which a role crashes here; the trainer's rank 0 crashes while it takes over the run."""


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_a_role_may_die_before_and_after_a_call(scenario: Scenario, server: EmbeddedServer, tmp_path: Path) -> None:
    coverage = crash_everywhere(scenario, server, tmp_path, [CALLS.get(scenario.name, 35)])
    assert len(coverage.points) == 2, coverage
    assert not coverage.failures, coverage.failures
