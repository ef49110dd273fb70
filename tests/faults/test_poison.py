"""A prompt that kills its workers. `python -m faults poison` is the long version."""

from pathlib import Path

import pytest

from faults.poison import run_poison
from faults.processes import Load
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer

LOAD = Load(lengths=(20, 40), lease_s=2.0)
MAX_DEATHS = TaskRules(batch_groups=1).max_deaths


@pytest.mark.long
def test_a_poisonous_prompt_is_quarantined_and_takes_no_other_with_it(
    fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    found = run_poison(fresh_server, tmp_path / "run", 1, load=LOAD, steps=8, workers=3)
    assert (found.deaths, found.quarantined, found.innocents_failed) == (MAX_DEATHS, 1, 0)
