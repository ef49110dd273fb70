"""Of several watchers with the same change, one reports it."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from urllib.parse import urlsplit

import pytest

from rollq.buffer.buffer import Buffer
from support.buffer_run import World
from support.proxy import PASS, Fate, Proxy, Verdict


@pytest.mark.any_server
def test_a_first_state_replaces_none(world: World) -> None:
    buffer = world.start(math={}).buffer
    found = [buffer.replace_reported_state(state, if_absent=True) for state in ("training", "training", "failing")]
    assert found == [None, "training", "training"]
    assert buffer.replace_reported_state("training") == "training"


@pytest.mark.any_server
def test_the_state_before_is_returned(world: World) -> None:
    buffer = world.start(math={}).buffer
    states = ["training", "training", "trainer gone", "training"]
    assert [buffer.replace_reported_state(state) for state in states] == [None, "training", "training", "trainer gone"]
    assert 0 < int(buffer.send("TTL", buffer.keys.reported_state)) <= 30 * 86_400


def test_of_many_with_the_same_change_one_reports_it(buffer: Buffer) -> None:
    World(buffer).start(math={})
    buffer.replace_reported_state("training")
    with ThreadPoolExecutor(16) as pool:
        for state in ("failing", "training", "starving"):
            found = list(pool.map(lambda _, state=state: buffer.replace_reported_state(state), range(64)))
            assert found.count(state) == 63


def test_a_change_whose_reply_was_lost_is_reported_still(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={})
    buffer.replace_reported_state("training")
    sets = count()
    drops = lambda command: Verdict(Fate.DROP) if b"SET\r\n" in command and not next(sets) else PASS  # noqa: E731
    with (
        Proxy(urlsplit(server_url).port or 0, drops) as proxy,
        Buffer.connect(proxy.url, buffer.run) as watcher,
    ):
        assert watcher.replace_reported_state("failing") == "training"
        assert next(sets) == 2
    assert buffer.replace_reported_state("failing") == "failing"
