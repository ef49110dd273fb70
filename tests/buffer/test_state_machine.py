"""Any sequence of moves, against a plain model: every group is where the model says, and the invariants hold."""

import pytest

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.buffer_machine import run_machine


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_any_sequence_of_moves_keeps_the_buffer_as_the_model_says(server: EmbeddedServer, examples: int) -> None:
    run_machine(server.url, examples=examples)
