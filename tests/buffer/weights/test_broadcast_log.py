"""Who takes part in a round of weights is agreed in its log, whatever is written twice, late or not at all."""

import threading
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.broadcast_log import (
    Broadcast,
    BroadcastLog,
    TensorSpec,
    apply_entry,
    assign_ranks,
    first_entry,
    round_number,
)
from rollq.buffer.weights.store import TTL_S
from support.waiting import PATIENCE_S

TENSORS = (TensorSpec("embed", "bfloat16", (7, 3)), TensorSpec("bias", "float32", ()))
OPENING = {"tensors": [list(spec) for spec in TENSORS], "join_s": 1.0, "timeout_s": 2.0}


def told(*entries: Mapping[str, Any]) -> Broadcast:
    found = first_entry(orjson.dumps(OPENING))
    for entry in entries:
        apply_entry(found, orjson.dumps(entry))
    return found


def test_workers_are_ready_until_members_are_named_and_nobody_is_named_twice() -> None:
    found = told(
        {"ready": "b", "ranks": 2, "attempt": 1},
        {"ready": "a", "ranks": 1, "attempt": 1},
        {"ready": "a", "ranks": 1, "attempt": 1},
        {"members": {"a": 1, "b": 2}, "meeting": {"port": 1}, "attempt": 1},
        {"ready": "late", "ranks": 1, "attempt": 1},
        {"members": {"late": 1}, "meeting": {}, "attempt": 1},
        {"took": "a", "attempt": 1},
    )
    assert (found.tensors, found.join_s, found.timeout_s) == (TENSORS, 1.0, 2.0)
    assert found.current.ready == {"b": 2, "a": 1}
    assert found.current.members == {"a": 1, "b": 2}
    assert found.current.meeting == {"port": 1}
    assert found.took == {"a"}
    assert not found.current.open


def test_another_attempt_is_opened_once_and_only_after_the_one_before() -> None:
    opened = {"opened": True, "attempt": 2}
    found = told(
        {"ready": "a", "ranks": 1, "attempt": 1},
        opened,
        {"broken": "a", "error": "no route", "attempt": 1},
        {"over": "a: no route", "attempt": 1},
        {"over": "", "attempt": 1},
        {"members": {"a": 1}, "meeting": {}, "attempt": 1},
        opened,
        {"ready": "c", "ranks": 1, "attempt": 2},
        opened,
        {"took": "a", "attempt": 1},
        {"ready": "d", "ranks": 1, "attempt": 9},
    )
    first, second = found.attempts
    assert (first.over, first.broken, first.members) == ("a: no route", {"a": "no route"}, None)
    assert second.ready == {"c": 1}
    assert second.open
    assert found.took == {"a"}, "who says so late has them all the same"


def test_who_comes_when_no_attempt_is_open_is_late_until_the_next_is() -> None:
    over = {"over": "", "attempt": 1}
    late = {"late": "z", "attempt": 1}
    assert told(over, late, late).late == {"z"}
    assert told(over, late, {"opened": True, "attempt": 2}).late == set()


def test_ranks_follow_each_other_behind_the_trainer() -> None:
    assert assign_ranks({"b": 4, "a": 2, "c": 1}) == {"a": 1, "b": 3, "c": 7}
    assert assign_ranks({}) == {}


@pytest.mark.parametrize(
    ("uri", "number"), [("nccl:7", 7), ("nccl:", None), ("nccl:-1", None), ("file:///7", None), ("7", None)]
)
def test_a_uri_tells_the_number_of_its_round(uri: str, number: int | None) -> None:
    assert round_number(uri) == number


def test_a_round_is_called_by_its_number_and_never_as_another(buffer: Buffer) -> None:
    buffer.create_run()
    _, stored = BroadcastLog.open(buffer, TENSORS, join_s=1, timeout_s=2)
    other, again = BroadcastLog.open(buffer, TENSORS, join_s=1, timeout_s=2)
    assert (stored.uri, again.uri) == ("nccl:1", "nccl:2")
    assert stored.digest != again.digest
    found = BroadcastLog(buffer, 1).read()
    assert (found.tensors, found.join_s, found.timeout_s, found.digest) == (TENSORS, 1, 2, stored.digest)
    assert other.read().digest == again.digest


def test_a_wait_ends_with_what_it_waits_for(buffer: Buffer) -> None:
    buffer.create_run()
    log, _ = BroadcastLog.open(buffer, TENSORS, join_s=1, timeout_s=2)
    found: list[Broadcast] = []
    waiting = threading.Thread(target=lambda: found.append(log.wait(lambda one: len(one.current.ready) == 2, 60)))
    waiting.start()
    for worker in ("a", "b"):
        BroadcastLog(buffer, 1).append({"ready": worker, "ranks": 1, "attempt": 1})
    waiting.join(PATIENCE_S)
    assert found[0].current.ready == {"a": 1, "b": 1}
    assert log.wait(lambda one: not one.current.open, 0.01).current.ready == {"a": 1, "b": 1}, "what there is by then"


def test_a_round_goes_a_day_after_its_trainer(buffer: Buffer) -> None:
    buffer.create_run()
    log, _ = BroadcastLog.open(buffer, TENSORS, join_s=1, timeout_s=2)
    key = buffer.keys.round(1)
    buffer.client.expire(key, 10)
    log.keep()
    assert TTL_S - 60 < buffer.client.ttl(key) <= TTL_S
    buffer.client.delete(key)
    with pytest.raises(WeightsError, match="no longer in Redis"):
        BroadcastLog(buffer, 1).read()
    log.append({"took": "a", "attempt": 1})  # of a worker that did not notice
    with pytest.raises(WeightsError, match="no longer in Redis"):
        BroadcastLog(buffer, 1).read()
