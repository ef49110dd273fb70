"""Lines about servers that do not serve."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from math import inf

import pytest
from redis.exceptions import ResponseError

from rollq.buffer.store import outage_log
from rollq.buffer.store.connection import Patience, connect, patiently
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.outage_log import Outages
from support.waiting import wait_until


def test_an_outage_has_a_line_a_minute_however_many_wait() -> None:
    found = Outages()
    assert [found.due("a", second) for second in (10.0, 10.1, 69.0, 70.0, 71.0, 131.0)] == [
        0.0, None, None, 60.0, None, 121.0
    ]  # fmt: skip
    assert found.due("b", 20.0) == 0.0
    assert found.end("a", 140.0) == 130.0
    assert found.end("a", 141.0) is None
    assert found.due("a", 150.0) == 0.0, "another outage"


def test_threads_that_wait_for_a_server_share_its_lines(
    fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(outage_log, "EVERY_S", 0.5)
    with connect(fresh_server.url) as client:
        fresh_server.kill()
        ping: Callable[[], object] = partial(client.set, "key", "value")
        threads = [threading.Thread(target=patiently, args=(client, ping, Patience(inf, inf))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: "s by now" in caplog.text)
        fresh_server.start()
        for thread in threads:
            thread.join()
    first, *others = [record.message for record in caplog.records if "waiting" in record.message]
    assert first.endswith(" - waiting for it")
    assert all("waiting for it, for " in line and line.endswith(" s by now") for line in others)
    assert len([record for record in caplog.records if "serves again after" in record.message]) == 1


def test_an_outage_is_over_once_the_server_has_answered_with_an_error(
    fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> object:
        return client.set("key", "value") if not fresh_server.running else client.execute_command("SET", "key")

    with connect(fresh_server.url) as client:
        for _ in range(2):
            fresh_server.kill()
            starting = threading.Timer(0.5, fresh_server.start)
            starting.start()
            with pytest.raises(ResponseError):
                patiently(client, write, Patience(inf, inf))
            starting.join()
    waits = [record.message for record in caplog.records if "waiting" in record.message]
    assert [line.endswith(" - waiting for it") for line in waits] == [True, True]
