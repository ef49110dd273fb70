"""`Buffer.query` on real servers: what it finds, and what it reads."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome, SalvageOutcome
from rollq.buffer.errors import StoreLost
from rollq.buffer.query import calls as asking
from rollq.buffer.query.language import parse_query
from rollq.buffer.query.ranking import QUERY_SORTS, Sort
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.store.connection import connect, open_client
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Prompt, Sample, SamplePart, SampleStatus, Status
from support.any_server import AnyServer
from support.buffer_run import World, make_sample
from support.query_strategies import QUERIES

PROFILE = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the world is only looked at
)
BROKEN = Sample(segments=(), status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="no reward")
EMPTY = Sample(segments=(), status=SampleStatus.ABORTED)


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


def fill(world: World) -> None:
    """Two tasks, one of each order, with groups in every status, of different ages, rewards and tries."""
    rules: dict[str, object] = {
        "max_staleness": 2,
        "max_uses": 2,
        "reuse_cooldown_steps": 1,
        "tail_batch_trigger_size": 1,
    }
    world.start(code={**rules, "order": "arrival"}, math=rules)
    for task in ("code", "math"):
        world.admit(14, task)
        mixed = GroupResult(world.lease(1, task)[0], (make_sample(0, reward=0.0), make_sample(0, reward=1.0)))
        assert world.buffer.put([mixed]) == [PutOutcome.COMPLETED]
        world.put(world.lease(3, task), reward=0.25)
    world.train(1, code=1, math=1)
    world.claim(2, code=1, math=1)
    for step in (2, 3):
        world.buffer.publish(world.held, step, uri="u", digest=str(step))
    for task in ("code", "math"):
        assert world.buffer.expire(task) == 2
        a, b, c, d, e = world.lease(5, task)
        two, one = make_sample(2), make_sample(1, reward=0.5)
        results = [
            GroupResult(a, (two, one)),  # counts as its older sample, which is too old at step 5
            GroupResult(b, (two, two), filtered=True, error="all equal"),
            GroupResult(c, (BROKEN, BROKEN)),
            GroupResult(d, (one, EMPTY)),
            GroupResult(e, (EMPTY, EMPTY)),
        ]
        world.buffer.put(results)
        world.buffer.hand_back(world.lease(1, task))
        world.put(world.lease(1, task), reward=0.75)
        batch = world.buffer.open_batch(task, "batch", "train", step=0)
        world.buffer.fill_batch(task, batch.handle, 0, [Prompt("of a batch")], last=True)
        world.put(world.lease(1, task))
        world.lease(1, task)
    world.buffer.publish(world.held, 4, uri="u", digest="4")


MATH = [
    GroupRecord(1, "math", "archived", 4, 1, 0.5, 1, step=1),
    GroupRecord(2, "math", "claimed", 4, 2, 0.25, 1, step=2),
    GroupRecord(3, "math", "expired", 3, 3, None, 1),
    GroupRecord(4, "math", "expired", 3, 4, None, 1),
    GroupRecord(5, "math", "completed", 3, 5, 0.75, 1),
    GroupRecord(6, "math", "filtered", 2, 6, 1.0, 1, "all equal"),
    GroupRecord(7, "math", "failed", 0, 7, None, 1, "no reward"),
    GroupRecord(8, "math", "aborted", 3, 8, 0.5, 1),
    GroupRecord(9, "math", "aborted", 0, 9, None, 1),
    GroupRecord(10, "math", "completed", 1, 10, 0.75, 1),
    GroupRecord(11, "math", "running", 0, 11, None, 1, step=1),
    GroupRecord(12, "math", "pending", 0, 12, None, 0, step=1),
    GroupRecord(13, "math", "pending", 0, 13, None, 0, step=1),
    GroupRecord(14, "math", "pending", 0, 14, None, 0, step=1),
    GroupRecord(15, "math", "cooling", 4, 15, 0.5, 1),
    GroupRecord(16, "math", "gathered", 1, 16, 1.0, 1),
]
"""What `fill` makes, at step 5: staleness is 4 - version, reward the mean of what was judged."""


def in_sets(buffer: Buffer, task: str) -> dict[int, str]:
    """Group id -> the status set that holds it, read one by one."""
    keys = task_keys(buffer.run, task)
    client: Any = buffer.client
    return {int(member): status.value for status in Status for member in client.zrange(keys.status(status), 0, -1)}


def test_xb15_a_query_for_everything_tells_all_groups_in_order(world: World) -> None:
    fill(world)
    world.check()
    found = world.buffer.query({})
    where = {task: in_sets(world.buffer, task) for task in ("code", "math")}
    # without an archive, nothing leaves by way of a status
    statuses = {status.value for status in Status} - {Status.LEAVING}
    assert set(where["code"].values()) == set(where["math"].values()) == statuses
    assert [(one.task, one.uid, one.status) for one in found] == [
        (task, group_id, status) for task in ("code", "math") for group_id, status in sorted(where[task].items())
    ]
    assert [one for one in found if one.task == "math"] == MATH
    assert [replace(one, task="math") for one in found if one.task == "code"] == MATH


def sampled(world: World) -> None:
    """Four groups of two samples each, with rewards and lengths."""
    world.start(math={"max_staleness": 4})
    world.admit(4)
    made = [
        (make_sample(0, reward=0.0, tokens=5), make_sample(0, reward=1.0, tokens=90)),
        (make_sample(0, reward=0.0, tokens=40), make_sample(0, reward=0.5, tokens=7)),
        (make_sample(0, reward=0.0, tokens=30), make_sample(0, reward=0.0, tokens=60)),
        (
            make_sample(0, reward=1.0, tokens=2),
            Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="judge.py:8 no number"),
        ),
    ]
    world.buffer.put([GroupResult(lease, pair) for lease, pair in zip(world.lease(4), made, strict=True)])


@pytest.mark.parametrize(
    ("query", "sort", "uids"),
    [
        ({}, "-tokens", [1, 3, 2, 4]),
        ({}, "tokens", [4, 2, 3, 1]),
        ({"min_reward": 0}, "-max_reward", [1, 2, 3]),
        ({"max_reward": {"$lt": 1}}, None, [2, 3]),
        ({"tokens": {"$between": [40, 60]}}, None, [2, 3]),
        ({"finish_reason": "stop", "min_reward": 1}, None, [4]),
        ({"finish_reason": "length"}, None, []),
        ({"sample": {"reward": 0}}, "-tokens", [3, 2, 1]),
        ({"sample": {"reward": {"$lte": 0.2}, "tokens": {"$gt": 30}}}, "-tokens", [3, 2]),
        ({"sample": {"reward": 1, "tokens": {"$lt": 90}}}, None, [4]),
        ({"sample": {"error": {"$contains": "NO NUMBER"}}}, None, [4]),
        ({"sample": {"reward": None}}, None, [4]),
        ({"sample": {"reward": {"$gte": 0.5}}}, "-reward", [1, 4, 2]),
    ],
)
def test_groups_are_found_and_sorted_by_their_samples(
    world: World, query: dict[str, Any], sort: str | None, uids: list[int]
) -> None:
    sampled(world)
    order = Sort.parse(sort, QUERY_SORTS) if sort else None
    assert [one.uid for one in world.buffer.query(query, sort=order)] == uids
    assert [one.uid for one in world.buffer.query(query, sort=order, limit=1)] == uids[:1]


@pytest.mark.parametrize(
    ("query", "uids"),
    [
        ({"status": "completed", "staleness": {"$gte": 1}}, [5, 10]),
        ({"status": "completed", "staleness": {"$between": [2, 3]}}, [5]),
        ({"status": "aborted", "staleness": 0}, [9]),
        ({"status": {"$in": ["aborted", "completed"]}, "staleness": {"$lt": 3}}, [9, 10]),
        ({"reward": {"$gt": 0.25, "$lte": 0.75}}, [1, 5, 8, 10, 15]),
        ({"reward": None, "status": {"$ne": "pending"}}, [3, 4, 7, 9, 11]),
        ({"tries": 0}, [12, 13, 14]),
        ({"uid": {"$gt": 14}}, [15, 16]),
        ({"step": 2}, [2]),
        ({"step": {"$lt": 2}}, [1, 11, 12, 13, 14]),
        ({"$or": [{"uid": 2}, {"status": "failed"}]}, [2, 7]),
        ({"uid": 99}, []),
        ({"$or": []}, []),
    ],
)
def test_xb15_a_query_finds_what_it_asks_for(world: World, query: dict[str, Any], uids: list[int]) -> None:
    fill(world)
    for task in ("code", "math"):
        assert [one.uid for one in world.buffer.query({"task": task, **query})] == uids
    assert len(world.buffer.query(query)) == 2 * len(uids)
    assert [(one.task, one.uid) for one in world.buffer.query(query, limit=1)] == [("code", uid) for uid in uids[:1]]


def test_xb15_any_query_answers_what_a_look_at_all_groups_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world)
    monkeypatch.setattr(asking, "IDS_PER_TRIP", 3)
    everything = world.buffer.query({})

    @PROFILE
    @given(QUERIES)
    def same(query: dict[str, Any]) -> None:
        assert world.buffer.query(query) == [one for one in everything if parse_query(query).holds(one)]

    same()


def commands_of(buffer: Buffer, query: dict[str, Any], limit: int | None = None) -> list[str]:
    """The commands that the server runs for a query, without reads of a task's clock."""
    seen: list[str] = []
    with buffer.client.monitor() as monitor:  # type: ignore[no-untyped-call]
        commands = monitor.listen()
        buffer.query(query, limit=limit)
        buffer.client.echo("done")
        for command in commands:
            if command["command"].startswith("ECHO"):
                return seen
            if not re.match(r"HGET(ALL)? \S+:clock\b", command["command"]):
                seen.append(command["command"])
    raise AssertionError("unreachable: the monitor shows the echo")


@pytest.mark.parametrize(
    ("query", "reads", "groups"),
    [
        ({"status": "completed"}, ["completed -inf (inf"], 2),
        (
            {"status": "completed", "staleness": {"$lt": 3}},
            [f"completed {2 * 2**32} ({(2**20 - 1) * 2**32}", f"completed {(2**20 - 1) * 2**32} (inf"],
            1,
        ),
        ({"status": "filtered", "arrival": {"$gt": 6}}, ["filtered 7 (inf"], 0),
        ({"$or": [{"status": "failed"}, {"status": "claimed"}]}, ["claimed -inf (inf", "failed -inf (inf"], 2),
        ({"uid": {"$between": [7, 9]}}, [], 3),
        ({"$or": []}, [], 0),
        ({"status": "completed", "staleness": 0.5}, [], 0),
    ],
)
def test_xb15_no_payload_and_no_other_set_is_read(
    fresh_server: EmbeddedServer, query: dict[str, Any], reads: list[str], groups: int
) -> None:
    with Buffer.connect(fresh_server.url, "run") as buffer:
        fill(World(buffer))
        seen = commands_of(buffer, {"task": "math", **query})
    prefix = "rollq:{run:math}:"
    assert [command for command in seen if command.startswith("ZRANGE")] == [
        f"ZRANGE {prefix}{read} BYSCORE" for read in reads
    ]
    hashes = [command for command in seen if command.startswith("HMGET")]
    assert len(hashes) == groups
    assert all(command.startswith(f"HMGET {prefix}group:") for command in hashes)
    others = {command.split()[0] for command in seen} - {"ZRANGE", "HMGET", "ZSCORE"}
    assert others <= {"HGET", "SMEMBERS", "HGETALL", "FCALL_RO", "CLIENT"}  # the last by a new connection
    assert not any("rollout" in command or "code" in command for command in seen)


def test_the_sets_of_a_task_are_read_at_one_instant(fresh_server: EmbeddedServer) -> None:
    """Else a group that moves from a set that is read late to one that was read already would be missed."""
    with Buffer.connect(fresh_server.url, "run") as buffer:
        World(buffer).start()
        words = [command.split()[0] for command in commands_of(buffer, {"status": {"$in": ["running", "completed"]}})]
    assert " ".join(words).endswith("FCALL_RO ZRANGE ZRANGE")


def test_a_query_with_a_limit_stops_reading_when_it_has_enough(
    fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "IDS_PER_TRIP", 4)
    with Buffer.connect(fresh_server.url, "run") as buffer:
        fill(World(buffer))
        seen = commands_of(buffer, {"staleness": {"$gte": 0}}, limit=2)
    assert len([command for command in seen if command.startswith("HMGET")]) == 4
    assert not any("math}:" in command for command in seen)


def test_a_group_that_leaves_while_it_is_looked_at_is_not_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start().complete(3)
    ids = world.buffer._ids

    def then_trained(task: str, what: Any) -> Any:
        found = ids(task, what)
        world.train(1)
        world.buffer.checkpoint(world.held, 1)
        return found

    monkeypatch.setattr(world.buffer, "_ids", then_trained)
    assert [one.uid for one in world.buffer.query({"reward": 1})] == [3]


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError:
        return True
    return False


def test_a_query_waits_for_a_server_that_is_busy(fresh_server: EmbeddedServer) -> None:
    def loop_until_killed() -> None:
        with connect(fresh_server.url) as other, pytest.raises(redis.ResponseError, match="killed"):
            other.eval("while true do end", 0)

    with Buffer.connect(fresh_server.url, "run") as buffer, open_client(fresh_server.url) as admin:
        World(buffer).start().complete(2)
        buffer.client.config_set("busy-reply-threshold", 1)
        looping, killing = threading.Thread(target=loop_until_killed), threading.Timer(0.3, admin.script_kill)
        looping.start()
        while not is_busy(admin):
            pass
        killing.start()
        assert [one.uid for one in buffer.query({"status": "completed"})] == [1, 2]
        looping.join()
        killing.join()


def test_a_query_tells_that_a_run_is_gone(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "run") as buffer:
        World(buffer).start()
        buffer.client.flushall()
        with pytest.raises(StoreLost, match="run 'run' is no longer in this store"):
            buffer.query({})


def test_the_staleness_of_groups_is_that_of_their_tokens_where_tokens_are_masked_by_age(world: World) -> None:
    world.start(math={"max_staleness": 3, "max_token_staleness": 0, "group_size": 1, "partial_rollout": True})
    world.admit(4)
    finished, interrupted, salvaged, _ = world.lease(4)
    world.buffer.put(
        [GroupResult(finished, (make_sample(0),)), GroupResult(interrupted, (make_sample(0, status="a"),))]
    )
    part = SamplePart(salvaged, number=0, index=0, tokens_before=0, sample=make_sample(0, status="a"))
    assert world.buffer.salvage([part]) == [SalvageOutcome.KEPT]
    assert world.buffer.inspect("math", 1)["oldest"] == "-3", "it expires with its last token that counts"
    staleness = {"uid": {"$lte": 3}, "staleness": 0}
    assert [record.staleness for record in world.buffer.query({})] == [0, 0, 0, 0]
    assert [record.uid for record in world.buffer.query(staleness)] == [1, 2, 3]
    assert [record.uid for record in world.buffer.query({"status": "completed", "staleness": 0})] == [1]
    assert [record.uid for record in world.buffer.query({"status": "completed", "staleness": {"$gte": 1}})] == []
    assert [group.oldest_version for group in world.claim(1, math=1).groups] == [0]


def test_after_a_rewind_tokens_are_as_old_as_the_step_that_it_went_back_to(world: World) -> None:
    world.start(math={"max_staleness": 3, "max_token_staleness": 0, "group_size": 1})
    for step in (1, 2):
        world.complete(2)
        world.train(step)
    world.complete(1)
    assert [record.staleness for record in world.buffer.query({"status": "completed"})] == [0]
    world.begin(0, mode="return", launch_id="again")
    records = world.buffer.query({"status": "completed"})
    assert [(record.uid, record.staleness) for record in records] == [(uid, 0) for uid in range(1, 6)]
    assert world.buffer.clock("math").step == 1


def test_prompts_and_what_was_written_are_searched(world: World) -> None:
    world.start()
    world.admit(3)
    call = {"function": {"name": "add", "arguments": {"number": "forty"}}}
    messages = [{"role": "assistant", "content": "I ask", "tool_calls": [call]}, {"role": "tool", "content": "Yes"}]
    agent = replace(make_sample(0, text="fine"), extra={"messages": messages})
    first, second = world.lease(2)
    world.buffer.put([GroupResult(first, (make_sample(0, text="Sorry"),) * 2), GroupResult(second, (agent, agent))])
    searched: list[int] = []

    def uids(query: dict[str, Any], limit: int | None = None) -> list[int]:
        return [one.uid for one in world.buffer.query(query, limit=limit, on_searched=searched.append)]

    assert uids({"prompt": {"$contains": "MATH"}}) == [1, 2, 3]
    assert uids({"prompt": {"$contains": "math 2"}}) == [3]
    assert uids({"text": {"$contains": "sorry"}}) == [1]
    assert uids({"text": {"$contains": "forty"}}) == uids({"text": {"$contains": "yes"}}) == [2]
    assert uids({"text": {"$contains": "assistant"}}) == []
    assert searched == [3] * 6
    assert uids({"status": "pending", "prompt": {"$contains": "math"}}) == [3]
    assert searched[6:] == [1]


def test_a_search_in_texts_reads_no_further_than_its_limit(world: World) -> None:
    world.start()
    world.complete(40)
    searched: list[int] = []
    found = world.buffer.query({"prompt": {"$contains": "math"}}, limit=3, on_searched=searched.append)
    assert [one.uid for one in found] == [1, 2, 3]
    assert searched == [16]


def test_a_group_whose_samples_cannot_be_read_is_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start().complete(1)
    world.buffer.client.hset(task_keys(world.buffer.run, "math").rollout(1), "all", b"damaged")
    assert world.buffer.query({"text": {"$contains": "x"}}) == []
    assert "group 1 of task 'math' is not searched: frame of 7 bytes" in caplog.text
