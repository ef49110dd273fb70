"""A few random runs. `python -m faults runs` plays many."""

import pytest

from faults.random_runs import broken_promise
from rollq.buffer.store.embedded_server import EmbeddedServer


@pytest.mark.long
def test_random_runs_break_no_promise(fresh_server: EmbeddedServer) -> None:
    stories = [broken_promise(seed, fresh_server.url) for seed in range(20)]
    assert not any(stories), list(filter(None, stories))
