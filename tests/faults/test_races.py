"""Short versions of `python -m faults races`."""

from collections import Counter

from faults.races import trainer_races, zombie_puts
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.store.embedded_server import EmbeddedServer


def test_no_late_result_is_accepted(server: EmbeddedServer) -> None:
    assert zombie_puts(server.url, 100) == Counter({PutOutcome.REFUSED: 100})


def test_of_two_trainers_one_takes_the_run(server: EmbeddedServer) -> None:
    assert trainer_races(server.url, 10) == 10
