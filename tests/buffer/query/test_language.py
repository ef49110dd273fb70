"""The query language: what it means, and what it refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError, QueryError
from rollq.buffer.query.language import MAX_DEPTH, parse_query
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.query.texts import GroupTexts
from rollq.buffer.values.rollouts import Status

ONE = GroupRecord(uid=3, task="math", status="completed", staleness=2, arrival=3, reward=0.5, tries=1, step=2)
FIELD_NAMES = (
    "uid, task, status, staleness, arrival, reward, min_reward, max_reward, tokens, finish_reason, tries, error, "
    "failure, step, prompt, text, sample"
)
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
        ({"step": 2}, True),
        ({"step": {"$gt": 2}}, False),
        ({"step": None}, False),
        ({"prompt": {"$contains": "a word"}}, True),  # until its text is read
        ({"$and": []}, True),
        ({"$or": []}, False),
        ({"$and": [{"uid": 3}, {"tries": 1}]}, True),
        ({"$and": [{"uid": 3}, {"tries": 2}]}, False),
        ({"$or": [{"uid": 4}, {"tries": 1}]}, True),
        ({"$or": [{"uid": 4}, {"tries": 2}]}, False),
        ({"uid": 3, "$or": [{"tries": 2}]}, False),
        ({"status": {"$in": ["failed", "completed"]}}, True),
        ({"status": {"$not_in": ["failed", "completed"]}}, False),
        ({"task": {"$gt": "code"}}, True),
        ({"task": {"$between": ["a", "m"]}}, False),
        ({"tries": {"$gt": 0.5}}, True),
        ({"error": ""}, True),
        ({"error": {"$ne": ""}}, False),
        ({"error": {"$contains": "timeout"}}, False),
        ({"$and": [{}]}, True),
        ({"$or": [{}]}, True),
        ({"$or": [{"$and": []}, {"$or": []}]}, True),
        ({"$and": [{"$and": []}, {"$or": []}]}, False),
        ({"$and": [{"uid": 3}], "$or": [{"uid": 4}]}, False),
        ({"$or": [{"$and": [{"uid": 3}, {"task": "math"}]}, {"uid": 9}]}, True),
    ],
)
def test_xb15_what_a_query_means(query: dict[str, Any], holds: bool) -> None:
    assert parse_query(query).holds(ONE) is holds


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("math", True),
        ("math.2of3", True),
        ("math.1of3", False),
        ("code", False),
        ({"$ne": "math"}, False),
        ({"$ne": "math.2of3"}, False),
        ({"$ne": "math.1of3"}, True),
        ({"$in": ["code", "math"]}, True),
        ({"$in": []}, False),
        ({"$not_in": ["code", "math"]}, False),
        ({"$not_in": ["code", "math.1of3"]}, True),
    ],
)
def test_a_shard_goes_by_the_name_of_its_task_too(condition: Any, holds: bool) -> None:
    assert parse_query({"task": condition}).holds(replace(ONE, task="math.2of3")) is holds


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({"reward": None}, True),
        ({"reward": {"$ne": None}}, False),
        ({"reward": {"$ne": 0.5}}, True),
        ({"reward": {"$gt": -1}}, False),
        ({"reward": {"$gte": -1}}, False),
        ({"reward": {"$lt": 1}}, False),
        ({"reward": {"$lte": 1}}, False),
        ({"reward": {"$between": [-1, 1]}}, False),
        ({"reward": {"$in": [None]}}, True),
        ({"reward": {"$not_in": [None, 0.5]}}, False),
    ],
)
def test_xb15_a_group_that_is_not_judged_has_no_reward_to_compare(query: dict[str, Any], holds: bool) -> None:
    assert parse_query(query).holds(UNJUDGED) is holds


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([], 'query []: must be an object, such as {"status": "completed"}'),
        ("status", 'query \'status\': must be an object, such as {"status": "completed"}'),
        (
            {"colour": 1},
            f"unknown field 'colour': the fields are {FIELD_NAMES}",
        ),
        (
            {7: 1},
            f"unknown field 7: the fields are {FIELD_NAMES}",
        ),
        ({"$nor": []}, "unknown operator '$nor': queries are combined by $and and $or"),
        (
            {"uid": {"$near": 1}},
            "unknown operator '$near' of field 'uid': the operators are $eq, $ne, $gt, $gte, $lt, $lte, $in, $not_in, "
            "$between",
        ),
        ({"$and": {}}, "$and: must be a list of queries, not {}"),
        ({"$or": {"uid": 1}}, "$or: must be a list of queries, not {'uid': 1}"),
        ({"$or": [3]}, 'query 3: must be an object, such as {"status": "completed"}'),
        (
            {"$and": [{"$or": [{"x": 1}]}]},
            f"unknown field 'x': the fields are {FIELD_NAMES}",
        ),
        ({"uid": {}}, 'uid: must be a value, or operators such as {"$gte": 1}'),
        ({"uid": "3"}, "uid $eq: must be a number, not '3'"),
        ({"uid": True}, "uid $eq: must be a number, not True"),
        ({"uid": None}, "uid $eq: must be a number, not None"),
        ({"uid": [1]}, "uid $eq: must be a number, not [1]"),
        ({"uid": {"$eq": {"$gt": 1}}}, "uid $eq: must be a number, not {'$gt': 1}"),
        ({"reward": {"$ne": "x"}}, "reward $ne: must be a number, not 'x'"),
        ({"reward": math.nan}, "reward $eq: must be a number, not nan"),
        ({"step": 10**400}, f"step $eq: must be a number, not 1{'0' * 59}"),
        ({"sample": {"reward": {"$gte": -(10**400)}}}, f"reward $gte: must be a number, not -1{'0' * 58}"),
        ({"reward": {"$lt": math.inf}}, "reward $lt: must be a number, not inf"),
        ({"reward": {"$gt": -math.inf}}, "reward $gt: must be a number, not -inf"),
        ({"task": 3}, "task $eq: must be a string, not 3"),
        ({"task": None}, "task $eq: must be a string, not None"),
        ({"status": "finished"}, f"status $eq: unknown status 'finished': must be one of {', '.join(Status)}"),
        (
            {"status": {"$in": ["failed", "lost"]}},
            f"status $in: unknown status 'lost': must be one of {', '.join(Status)}",
        ),
        ({"uid": {"$in": 3}}, "uid $in: must be a list, not 3"),
        ({"status": {"$in": "failed"}}, "status $in: must be a list, not 'failed'"),
        ({"uid": {"$not_in": {"a": 1}}}, "uid $not_in: must be a list, not {'a': 1}"),
        ({"uid": {"$in": ["x"]}}, "uid $in: must be a number, not 'x'"),
        ({"uid": {"$between": [1]}}, "uid $between: must be two bounds, [low, high], not [1]"),
        ({"uid": {"$between": [1, 2, 3]}}, "uid $between: must be two bounds, [low, high], not [1, 2, 3]"),
        ({"uid": {"$between": 1}}, "uid $between: must be two bounds, [low, high], not 1"),
        ({"task": {"$between": "ab"}}, "task $between: must be two bounds, [low, high], not 'ab'"),
        ({"uid": {"$between": [2, 1]}}, "uid $between: the lower bound comes first, not [2, 1]"),
        ({"reward": {"$between": [None, 1]}}, "reward $between: must be a number, not None"),
        ({"reward": {"$gt": None}}, "reward $gt: must be a number, not None"),
        ({"task": {"$lt": 3}}, "task $lt: must be a string, not 3"),
        (
            {"finish_reason": "bored"},
            "finish_reason $eq: unknown finish reason 'bored': must be one of stop, length, tool_calls, abort, error",
        ),
        (
            {"finish_reason": {"$gt": "stop"}},
            "unknown operator '$gt' of field 'finish_reason': the operators are $eq, $ne, $in, $not_in",
        ),
        ({"sample": 0}, 'sample: must be conditions on one sample, such as {"reward": 0}, not 0'),
        ({"sample": {}}, 'sample: must be conditions on one sample, such as {"reward": 0}, not {}'),
        (
            {"sample": {"step": 3}},
            "sample: unknown field 'step': the fields are reward, tokens, finish_reason, error, failure",
        ),
    ],
)
def test_xb15_what_makes_no_sense_is_named(query: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_query(query)
    assert isinstance(refused.value, QueryError)
    assert isinstance(refused.value, ConfigError)
    assert str(refused.value) == message


def nested(depth: int) -> dict[str, Any]:
    """A query in which queries stand `depth` deep."""
    query: dict[str, Any] = {"uid": 3}
    for _ in range(depth - 1):
        query = {"$and": [query]}
    return query


def test_queries_may_be_nested_deeply_but_not_without_end() -> None:
    assert parse_query(nested(MAX_DEPTH)).holds(ONE)
    with pytest.raises(QueryError, match="the query is nested more than 32 levels deep: write"):
        parse_query(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(("text", "holds"), [("timeout", True), ("TIMEOUT: w", True), ("time out", False), ("", True)])
def test_errors_are_searched_in_upper_and_lower_case(text: str, holds: bool) -> None:
    failed = replace(ONE, status="failed", error="judges.TimeOut: waited 3 s")
    assert parse_query({"error": {"$contains": text}}).holds(failed) is holds


def test_only_errors_are_searched() -> None:
    with pytest.raises(
        QueryError, match=r"unknown operator '\$contains' of field 'task': the operators are .*\$between$"
    ):
        parse_query({"task": {"$contains": "ma"}})
    with pytest.raises(QueryError, match=r"error \$contains: must be a string, not 3"):
        parse_query({"error": {"$contains": 3}})
    with pytest.raises(
        QueryError, match=r"unknown operator '\$like' of field 'error': the operators are .*\$contains$"
    ):
        parse_query({"error": {"$like": "x"}})


@pytest.mark.parametrize(
    ("query", "holds", "searches"),
    [
        ({"prompt": {"$contains": "Two"}}, True, True),
        ({"prompt": {"$contains": "four"}}, False, True),
        ({"text": {"$contains": "FOUR"}, "uid": 3}, True, True),
        ({"text": {"$contains": "four"}, "uid": 4}, False, True),
        ({"$or": [{"text": {"$contains": "five"}}, {"uid": 3}]}, True, True),
        ({"$or": [{"text": {"$contains": "five"}}, {"uid": 4}]}, False, True),
        ({"error": {"$contains": "two"}}, False, False),
    ],
)
def test_texts_are_searched_in_upper_and_lower_case(query: dict[str, Any], holds: bool, searches: bool) -> None:
    condition = parse_query(query)
    assert condition.holds(ONE, GroupTexts("two and two", "It is four.")) is holds
    assert condition.searches_texts is searches


@pytest.mark.parametrize("value", ["a word", {"$eq": "a word"}, {"$in": ["a word"]}])
def test_a_text_can_only_be_searched(value: Any) -> None:
    with pytest.raises(QueryError, match=r'^text: only \$contains searches it, such as \{"text": \{"\$contains"'):
        parse_query({"text": value})
