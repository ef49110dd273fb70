"""What is read for a query: enough, and no more than the sorted sets can spare."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from rollq.buffer.query.language import parse_query
from rollq.buffer.query.plan import BY_VERSION, Range, Reach, ReadPlan, Scores, plan_reads, reach_of, steps_of
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.values.rollouts import Status
from support.query_strategies import QUERIES, TASKS

PROFILE = settings(derandomize=True, max_examples=300, deadline=None, database=None)
ALL = frozenset(Status)
BOTH = frozenset(TASKS)
MATH = frozenset({"math"})
FAILED = frozenset({Status.FAILED})
ARCHIVED = frozenset({Status.ARCHIVED})
OF_A_STEP = ARCHIVED | {Status.CLAIMED, Status.LEAVING, Status.PENDING, Status.RUNNING}
VERSION = 2**32
NO_TOKENS = (2**20 - 1) * VERSION
INF = math.inf


@pytest.mark.parametrize(
    ("query", "reach"),
    [
        ({}, Reach(BOTH)),
        ({"task": "math"}, Reach(MATH)),
        ({"task": {"$ne": "code"}}, Reach(MATH)),
        ({"task": "sort"}, Reach(frozenset())),
        ({"status": "failed"}, Reach(BOTH, FAILED)),
        ({"status": {"$ne": "failed"}}, Reach(BOTH, ALL - FAILED)),
        ({"status": {"$in": ["failed", "pending"]}, "task": "math"}, Reach(MATH, FAILED | {Status.PENDING})),
        ({"$and": [{"status": "failed"}, {"status": "pending"}]}, Reach(BOTH, frozenset())),
        ({"$or": [{"status": "failed"}, {"status": "pending"}]}, Reach(BOTH, FAILED | {Status.PENDING})),
        ({"$or": [{"status": "failed"}, {"uid": 1}]}, Reach(BOTH)),
        ({"$or": [{"task": "math"}, {"task": "sort"}]}, Reach(MATH)),
        ({"$or": [{"task": "math"}, {"task": "code"}]}, Reach(BOTH)),
        ({"$or": []}, Reach(frozenset())),
        ({"$or": [{"$or": []}, {"uid": 3}]}, Reach(BOTH, arrivals=Range(3, 3))),
        ({"$or": [{"uid": 3}, {"$or": []}]}, Reach(BOTH, arrivals=Range(3, 3))),
        ({"$or": [{"status": "failed"}, {"uid": 5, "staleness": 0.5}]}, Reach(BOTH, FAILED)),
        ({"uid": 3}, Reach(BOTH, arrivals=Range(3, 3))),
        ({"arrival": {"$gt": 3}}, Reach(BOTH, arrivals=Range(4, INF))),
        ({"arrival": {"$gt": 2.5}}, Reach(BOTH, arrivals=Range(3, INF))),
        ({"arrival": {"$gte": 3}}, Reach(BOTH, arrivals=Range(3, INF))),
        ({"arrival": {"$gte": 2.5}}, Reach(BOTH, arrivals=Range(3, INF))),
        ({"arrival": {"$lt": 3}}, Reach(BOTH, arrivals=Range(-INF, 2))),
        ({"arrival": {"$lt": 2.5}}, Reach(BOTH, arrivals=Range(-INF, 2))),
        ({"arrival": {"$lte": 3}}, Reach(BOTH, arrivals=Range(-INF, 3))),
        ({"arrival": {"$lte": 3.5}}, Reach(BOTH, arrivals=Range(-INF, 3))),
        ({"arrival": {"$between": [1.5, 3.5]}}, Reach(BOTH, arrivals=Range(2, 3))),
        ({"arrival": {"$in": [7, 2, 5]}}, Reach(BOTH, arrivals=Range(2, 7))),
        ({"arrival": {"$in": [2.5, 7.5]}}, Reach(BOTH, arrivals=Range(3, 7))),
        ({"arrival": {"$in": []}}, Reach(BOTH, arrivals=Range(INF, -INF))),
        ({"arrival": {"$ne": 3}}, Reach(BOTH)),
        ({"arrival": {"$not_in": [3]}}, Reach(BOTH)),
        ({"uid": {"$gte": 2}, "arrival": {"$lt": 9}}, Reach(BOTH, arrivals=Range(2, 8))),
        ({"staleness": {"$gte": 1}}, Reach(BOTH, staleness=Range(1, INF))),
        ({"staleness": {"$gte": 1, "$lte": 2}}, Reach(BOTH, staleness=Range(1, 2))),
        ({"$or": [{"staleness": 1}, {"staleness": 4}]}, Reach(BOTH, staleness=Range(1, 4))),
        ({"$or": [{"uid": 9}, {"uid": 4}]}, Reach(BOTH, arrivals=Range(4, 9))),
        ({"reward": {"$gt": 0.5}, "tries": 2}, Reach(BOTH)),
        ({"sample": {"reward": 0}}, Reach(BOTH)),
        ({"step": 3}, Reach(BOTH, OF_A_STEP, steps=Range(3, 3))),
        ({"step": {"$gte": 3, "$lt": 5}, "status": "archived"}, Reach(BOTH, ARCHIVED, steps=Range(3, 4))),
        ({"step": None}, Reach(BOTH)),
        ({"step": {"$in": [3, None]}}, Reach(BOTH)),
        ({"$or": [{"step": 3}, {"step": 5}]}, Reach(BOTH, OF_A_STEP, steps=Range(3, 5))),
    ],
)  # fmt: skip
def test_xb15_where_groups_of_a_query_can_be(query: dict[str, Any], reach: Reach) -> None:
    assert reach_of(parse_query(query), BOTH) == reach


@pytest.mark.parametrize(
    ("query", "is_empty"),
    [
        ({}, False),
        ({"$or": []}, True),
        ({"task": "sort"}, True),
        ({"status": "failed", "$and": [{"status": "pending"}]}, True),
        ({"staleness": {"$gt": 1, "$lt": 2}}, True),
        ({"uid": 0.5}, True),
        ({"uid": 1}, False),
        ({"staleness": 1}, False),
    ],
)
def test_xb15_a_query_that_nothing_can_match_is_known(query: dict[str, Any], is_empty: bool) -> None:
    assert reach_of(parse_query(query), BOTH).is_empty is is_empty


def planned(query: dict[str, Any], order: str = "staleness") -> ReadPlan:
    return plan_reads(reach_of(parse_query(query), BOTH), step=5, order=order, most_ids=3)


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"uid": 7}, range(7, 8)),
        ({"uid": 7, "status": "failed", "staleness": 1}, range(7, 8)),
        ({"arrival": {"$between": [7, 9]}}, range(7, 10)),
        ({"arrival": {"$lte": 3}}, range(1, 4)),
        ({"arrival": {"$between": [-5, 2]}}, range(1, 3)),
        ({"arrival": {"$lt": 1}}, range(1, 1)),
    ],
)
def test_xb15_few_groups_that_a_query_names_are_read_without_any_set(query: dict[str, Any], ids: range) -> None:
    found = planned(query)
    assert (found.ids, found.scores) == (ids, ())


def test_more_groups_than_a_trip_are_looked_for_in_the_sets() -> None:
    found = planned({"status": "failed", "arrival": {"$between": [7, 10]}})
    assert (found.ids, found.scores) == (range(0), (Scores("failed", 7, 11),))


@pytest.mark.parametrize(
    ("query", "order", "scores"),
    [
        ({"status": "pending"}, "staleness", [Scores("pending")]),
        ({"status": "pending", "staleness": 1, "uid": {"$gt": 9}}, "staleness", [Scores("pending")]),
        ({"status": "completed"}, "staleness", [Scores("completed")]),
        ({"status": "completed"}, "arrival", [Scores("completed", -INF, INF)]),
        ({"status": "completed", "uid": {"$gt": 9}}, "staleness", [Scores("completed")]),
        ({"status": "completed", "uid": {"$gt": 9}}, "arrival", [Scores("completed", 10, INF)]),
        ({"status": "completed", "uid": {"$between": [4, 9]}}, "arrival", [Scores("completed", 4, 10)]),
        *[
            ({"status": status, "uid": {"$between": [4, 9]}}, "staleness", [Scores(status, 4, 10)])
            for status in ("gathered", "expired", "filtered", "failed")
        ],
        *[
            ({"status": status, "uid": {"$between": [4, 9]}}, "arrival", [Scores(status)])
            for status in ("pending", "running", "cooling", "claimed", "archived")
        ],
        # versions at step 5: staleness 1 is version 3, staleness 3 is version 1
        (
            {"status": "completed", "staleness": {"$between": [1, 3]}},
            "staleness",
            [Scores("completed", VERSION, 4 * VERSION)],
        ),
        (
            {"status": {"$in": ["completed", "aborted"]}, "staleness": {"$gte": 1}, "uid": {"$gt": 9}},
            "arrival",
            [Scores(BY_VERSION, -INF, 4 * VERSION)],
        ),
        ({"status": "completed", "staleness": 7}, "staleness", [Scores("completed", -3 * VERSION, -2 * VERSION)]),
        # groups without tokens have staleness 0, and a place of their own
        (
            {"status": "aborted", "staleness": 0},
            "staleness",
            [Scores("aborted", 4 * VERSION, 5 * VERSION), Scores("aborted", NO_TOKENS, INF)],
        ),
        (
            {"status": "aborted", "staleness": {"$lt": 2}},
            "arrival",
            [Scores(BY_VERSION, 3 * VERSION, NO_TOKENS), Scores(BY_VERSION, NO_TOKENS, INF)],
        ),
        ({"status": "aborted", "staleness": {"$lt": 0}}, "arrival", [Scores(BY_VERSION, 5 * VERSION, NO_TOKENS)]),
        (
            {"status": {"$in": ["failed", "completed"]}, "staleness": 1},
            "staleness",
            [Scores("completed", 3 * VERSION, 4 * VERSION), Scores("failed")],
        ),
    ],
)
def test_xb15_which_ranges_of_which_sets_are_read(query: dict[str, Any], order: str, scores: list[Scores]) -> None:
    found = planned(query, order)
    assert list(found.scores) == scores
    assert not found.ids


def groups() -> list[GroupRecord]:
    """One group for every combination of what queries speak of."""
    return [
        GroupRecord(uid, task, status, staleness, uid, reward, tries)
        for task in TASKS
        for uid, (status, staleness, reward, tries) in enumerate(
            (
                (status.value, staleness, reward, tries)
                for status in Status
                for staleness in range(4)
                for reward, tries in ((None, 1), (0.0, 2), (0.5, 1))
            ),
            start=1,
        )
    ]


GROUPS = groups()


def indexes(order: str, step: int, task: str, token_shift: int) -> Mapping[str, Sequence[tuple[float, int]]]:
    """Name -> (score, id) of the sorted sets, as the functions of the buffer fill them."""
    sets: dict[str, list[tuple[float, int]]] = {BY_VERSION: [], **{status.value: [] for status in Status}}
    for group in GROUPS:
        if group.task != task:
            continue
        # every second fresh group has no tokens; of the others, every third counts as older than its oldest token
        older = token_shift if group.uid % 3 == 0 else 0
        version = 2**20 - 1 if group.staleness == 0 and group.uid % 2 else step - group.staleness - 1 + older
        by_version, score = version * VERSION + group.arrival, group.arrival
        if group.status in ("completed", "aborted"):
            sets[BY_VERSION].append((by_version, group.uid))
            score = score if order == "arrival" else by_version
        elif group.status not in ("gathered", "expired", "filtered", "failed"):
            score = 7 * group.uid % 5
        sets[group.status].append((score, group.uid))
    return sets


def answer(query: dict[str, Any], order: str, most_ids: int, token_shift: int = 0) -> list[GroupRecord]:
    """The answer, read by plan from sorted sets in memory."""
    condition, step = parse_query(query), 3
    reach = reach_of(condition, BOTH)
    found = []
    for task in () if reach.is_empty else reach.tasks:
        what = plan_reads(reach, step=step, order=order, most_ids=most_ids, token_shift=token_shift)
        sets = indexes(order, step, task, token_shift)
        ids = set(what.ids)
        for one in what.scores:
            ids |= {group_id for score, group_id in sets[one.index] if one.low <= score < one.high}
        found += [group for group in GROUPS if group.task == task and group.uid in ids and condition.holds(group)]
    return sorted(found, key=GROUPS.index)


@pytest.mark.long
@PROFILE
@given(QUERIES)
def test_xb15_the_plan_misses_no_group_that_a_look_at_all_of_them_finds(query: dict[str, Any]) -> None:
    condition = parse_query(query)
    expected = [group for group in GROUPS if condition.holds(group)]
    for order in ("staleness", "arrival"):
        for token_shift in (0, -3):
            assert answer(query, order, most_ids=4, token_shift=token_shift) == expected


def test_the_groups_of_a_step_are_read_by_its_number() -> None:
    found = planned({"step": 3, "status": {"$in": ["archived", "claimed", "leaving"]}})
    assert found.scores == tuple(Scores(status, 3, 4) for status in ("archived", "claimed", "leaving"))


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ({}, Range()),
        ({"step": 3}, Range(3, 3)),
        ({"$or": [{"task": "math", "step": 3}, {"step": {"$gt": 5}}]}, Range(3, INF)),
        ({"$or": [{"step": 3}, {"status": "failed"}]}, Range()),
        ({"step": {"$ne": 3}}, Range()),
    ],
)
def test_the_steps_of_a_query_are_known_without_its_tasks(query: dict[str, Any], steps: Range) -> None:
    assert steps_of(parse_query(query)) == steps
