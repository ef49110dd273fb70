"""The query language: what is parsed, what it means, and what it reads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.core import task_keys
from rollq.buffer.query import QueryError, Record, parse_query
from rollq.buffer.replay import Buffer
from rollq.buffer.schema import GroupResult, Status
from rollq.buffer.server import EmbeddedServer
from world import World, make_sample

ONE = Record(uid=3, task="math", status="completed", staleness=2, arrival=3, reward=0.5, tries=1)
UNJUDGED = replace(ONE, reward=None)


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({}, True),
        ({"uid": 3}, True),
        ({"uid": 4}, False),
        ({"task": "math", "status": "completed"}, True),
        ({"task": "math", "status": "failed"}, False),
        ({"staleness": {"$eq": 2}}, True),
        ({"staleness": {"$eq": 1}}, False),
        ({"staleness": {"$ne": 2}}, False),
        ({"staleness": {"$ne": 1}}, True),
        ({"staleness": {"$gt": 2}}, False),
        ({"staleness": {"$gt": 1}}, True),
        ({"staleness": {"$gte": 2}}, True),
        ({"staleness": {"$gte": 3}}, False),
        ({"staleness": {"$lt": 2}}, False),
        ({"staleness": {"$lt": 3}}, True),
        ({"staleness": {"$lte": 2}}, True),
        ({"staleness": {"$lte": 1}}, False),
        ({"arrival": {"$in": [1, 3]}}, True),
        ({"arrival": {"$in": []}}, False),
        ({"arrival": {"$not_in": [1, 3]}}, False),
        ({"arrival": {"$not_in": [1]}}, True),
        ({"reward": {"$between": [0.5, 0.9]}}, True),
        ({"reward": {"$between": [0.1, 0.5]}}, True),
        ({"reward": {"$between": [0.6, 0.9]}}, False),
        ({"reward": {"$between": [0.1, 0.4]}}, False),
        ({"reward": {"$between": [0.5, 0.5]}}, True),
        ({"reward": {"$gte": 0, "$lt": 0.5}}, False),
        ({"reward": {"$gte": 0, "$lt": 1}}, True),
        ({"tries": 1, "reward": {"$gt": 0.9}}, False),
        ({"$and": []}, True),
        ({"$or": []}, False),
        ({"$and": [{"uid": 3}, {"tries": 1}]}, True),
        ({"$and": [{"uid": 3}, {"tries": 2}]}, False),
        ({"$or": [{"uid": 4}, {"tries": 1}]}, True),
        ({"$or": [{"uid": 4}, {"tries": 2}]}, False),
        ({"uid": 3, "$or": [{"tries": 2}]}, False),
        ({"$or": [{"$and": [{"uid": 3}, {"task": "math"}]}, {"uid": 9}]}, True),
    ],
)
def test_xb15_what_a_query_means(query: dict[str, Any], holds: bool) -> None:
    assert parse_query(query).holds(ONE) is holds


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({"reward": None}, True),
        ({"reward": {"$ne": None}}, False),
        ({"reward": {"$ne": 0.5}}, True),
        ({"reward": {"$gt": -1}}, False),
        ({"reward": {"$lt": 1}}, False),
        ({"reward": {"$between": [-1, 1]}}, False),
        ({"reward": {"$in": [None]}}, True),
    ],
)
def test_xb15_a_group_that_is_not_judged_has_no_reward_to_compare(query: dict[str, Any], holds: bool) -> None:
    assert parse_query(query).holds(UNJUDGED) is holds


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([], r"query \[\]: an object is needed, such as"),
        ({"colour": 1}, "unknown field 'colour': there are uid, task, status, staleness, arrival, reward, tries"),
        ({"$nor": []}, r"unknown operator '\$nor': between queries there are \$and and \$or"),
        ({"uid": {"$near": 1}}, r"unknown operator '\$near' of field 'uid': there are \$eq, \$ne, \$gt"),
        ({"$and": {}}, r"\$and: a list of queries is needed, not \{\}"),
        ({"$or": [3]}, "query 3: an object is needed"),
        ({"uid": {}}, "uid: operators are needed"),
        ({"uid": "3"}, r"uid \$eq: a number is needed, not '3'"),
        ({"uid": True}, r"uid \$eq: a number is needed, not True"),
        ({"uid": None}, r"uid \$eq: a number is needed, not None"),
        ({"task": 3}, r"task \$eq: a text is needed, not 3"),
        ({"status": "finished"}, r"status \$eq: unknown status 'finished': there are pending, running"),
        ({"status": {"$in": ["failed", "lost"]}}, r"status \$in: unknown status 'lost'"),
        ({"uid": {"$in": 3}}, r"uid \$in: a list is needed, not 3"),
        ({"uid": {"$not_in": {"a": 1}}}, r"uid \$not_in: a list is needed"),
        ({"uid": {"$in": ["x"]}}, r"uid \$in: a number is needed, not 'x'"),
        ({"uid": {"$between": [1]}}, r"uid \$between: two bounds are needed, \[low, high\], not \[1\]"),
        ({"uid": {"$between": 1}}, r"uid \$between: two bounds are needed"),
        ({"uid": {"$between": [2, 1]}}, r"uid \$between: the lower bound comes first, not \[2, 1\]"),
        ({"reward": {"$between": [None, 1]}}, r"reward \$between: a number is needed, not None"),
        ({"reward": {"$gt": None}}, r"reward \$gt: a number is needed, not None"),
        ({"task": {"$lt": 3}}, r"task \$lt: a text is needed, not 3"),
    ],
)
def test_xb15_what_makes_no_sense_is_named(query: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_query(query)
    assert isinstance(refused.value, QueryError)


@pytest.mark.parametrize(
    ("query", "statuses", "tasks"),
    [
        ({}, set(Status), {"math", "code"}),
        ({"status": "failed"}, {Status.FAILED}, {"math", "code"}),
        ({"status": {"$in": ["failed", "filtered"]}, "task": "code"}, {Status.FAILED, Status.FILTERED}, {"code"}),
        ({"status": {"$ne": "failed"}}, set(Status) - {Status.FAILED}, {"math", "code"}),
        ({"$or": [{"status": "failed"}, {"status": "pending"}]}, {Status.FAILED, Status.PENDING}, {"math", "code"}),
        ({"$or": [{"task": "math"}, {"task": "sort"}]}, set(Status), {"math"}),
        ({"$or": [{"status": "failed"}, {"uid": 1}]}, set(Status), {"math", "code"}),
        ({"$and": [{"status": "failed"}, {"status": "pending"}]}, set(), {"math", "code"}),
        ({"$or": []}, set(), set()),
        ({"staleness": 1, "status": "completed"}, {Status.COMPLETED}, {"math", "code"}),
    ],
)
def test_xb15_which_sets_have_to_be_read(query: dict[str, Any], statuses: set[Status], tasks: set[str]) -> None:
    condition = parse_query(query)
    assert condition.statuses() == statuses
    assert condition.tasks(frozenset({"math", "code"})) == tasks


# -- on a server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def world(server: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(server.url, run_name) as buffer:
        yield World(buffer)


def fill(world: World) -> None:
    """Two tasks with groups in most statuses, of different ages and rewards."""
    world.start(math={"max_staleness": 3}, code={"max_staleness": 3})
    world.complete(2, "math")
    world.buffer.publish(world.held, 1, uri="u", digest="d")
    world.admit(5, "math")
    leases = world.lease(4, "math")
    low, high = make_sample(1, reward=0.0), make_sample(1, reward=1.0)
    world.buffer.put([GroupResult(leases[0], (low, high)), GroupResult(leases[1], (low, low), filtered=True)])
    world.put([leases[2]], status="a")
    world.admit(2, "code")
    world.claim(2, math=1)


def test_xb15_a_query_finds_the_groups_in_order_with_their_numbers(world: World) -> None:
    fill(world)
    found = world.buffer.query({"status": "completed", "staleness": {"$gte": 1}})
    assert found == [Record(2, "math", "completed", 1, 2, 1.0, 1)]
    assert [(one.task, one.uid) for one in world.buffer.query({"status": "pending"})] == [
        ("code", 1),
        ("code", 2),
        ("math", 7),
    ]
    assert world.buffer.query({"reward": {"$between": [0.4, 0.6]}}) == [Record(3, "math", "completed", 0, 3, 0.5, 1)]
    assert [one.status for one in world.buffer.query({"reward": None, "task": "math"})] == [
        "aborted",
        "running",
        "pending",
    ]
    assert world.buffer.query({"$or": []}) == []
    assert len(world.buffer.query({})) == 9
    assert len(world.buffer.query({}, limit=4)) == 4


def test_xb15_no_payload_and_no_other_set_is_read(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "run") as buffer:
        world = World(buffer)
        fill(world)
        keys = task_keys("run", "math")
        with buffer.client.monitor() as monitor:  # type: ignore[no-untyped-call]
            commands = iter(monitor.listen())
            buffer.query({"status": "completed", "task": "math"})
            buffer.client.echo("done")
            seen = []
            for command in commands:
                if command["command"].startswith("ECHO"):
                    break
                seen.append(command["command"])
    assert [command for command in seen if command.startswith("ZRANGE")] == [
        f"ZRANGE {keys.status(Status.COMPLETED)} 0 -1"
    ]
    assert len([command for command in seen if command.startswith("HMGET")]) == 2
    assert not any("rollout" in command for command in seen)


NUMBERS = st.integers(0, 3)
NAMES = st.lists(st.sampled_from([status.value for status in Status]))
COMPARED = st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"])
LEAVES = st.one_of(
    st.builds(lambda op, n: {"staleness": {op: n}}, COMPARED, NUMBERS),
    st.builds(lambda op, names: {"status": {op: names}}, st.sampled_from(["$in", "$not_in"]), NAMES),
    st.sampled_from([{"task": "math"}, {"task": {"$ne": "math"}}, {"reward": None}, {"reward": {"$gt": 0.2}}, {}]),
)  # fmt: skip
QUERIES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda op, parts: {op: parts}, st.sampled_from(["$and", "$or"]), st.lists(inner, max_size=3)
    ),
    max_leaves=6,
)


@given(QUERIES)
def test_xb15_what_is_not_read_would_not_have_matched(query: dict[str, Any]) -> None:
    condition = parse_query(query)
    statuses, tasks = condition.statuses(), condition.tasks(frozenset({"math", "code"}))
    for task in ("math", "code"):
        for status in Status:
            for staleness in range(4):
                for reward in (None, 0.0, 0.5):
                    record = Record(1, task, status.value, staleness, 1, reward, 1)
                    if condition.holds(record):
                        assert status in statuses
                        assert task in tasks
