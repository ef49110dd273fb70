"""Queries for property tests, of every field and operator."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from rollq.buffer.values.rollouts import Status

TASKS = ("code", "math")

_WHOLE = st.one_of(st.integers(-1, 6), st.sampled_from([0.5, 1.5, 2.0]))
_IDS = st.one_of(st.integers(-1, 14), st.sampled_from([60, 132, 2.5]))
_REWARDS = st.sampled_from([0, 0.25, 0.5, 1])
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "uid": _IDS,
    "arrival": _IDS,
    "task": st.sampled_from([*TASKS, "sort"]),
    "status": st.sampled_from([status.value for status in Status]),
    "staleness": _WHOLE,
    "reward": _REWARDS,
    "tries": _WHOLE,
    "error": st.sampled_from(["", "all equal", "no reward"]),
    "step": _WHOLE,
    "min_reward": _REWARDS,
    "max_reward": _REWARDS,
    "tokens": _WHOLE,
}
_SAMPLE_FIELDS = ("reward", "tokens", "error")


def _operators(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    compared = st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"])
    listed = st.sampled_from(["$in", "$not_in"])
    bounds = st.lists(values, min_size=2, max_size=2).map(sorted)
    one = st.one_of(
        st.tuples(compared, values),
        st.tuples(listed, st.lists(values, max_size=3)),
        st.tuples(st.just("$between"), bounds),
    )
    return st.lists(one, min_size=1, max_size=2).map(dict)


def _fields(names: Sequence[str]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.sampled_from(names).flatmap(
        lambda field: st.tuples(st.just(field), st.one_of(_VALUES[field], _operators(_VALUES[field])))
    )


_FIELD = _fields(sorted(_VALUES))
_SAMPLE = st.lists(_fields(_SAMPLE_FIELDS), min_size=1, max_size=2).map(lambda parts: {"sample": dict(parts)})
_REASON = st.sampled_from(["stop", "abort"]).flatmap(
    lambda reason: st.sampled_from([{"finish_reason": reason}, {"finish_reason": {"$not_in": [reason]}}])
)
_LEAVES = st.one_of(
    st.lists(_FIELD, max_size=3).map(dict),
    _SAMPLE,
    _REASON,
    st.sampled_from([{"reward": None}, {"reward": {"$ne": None}}, {"error": {"$contains": "E"}}, {"step": None}]),
)

QUERIES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    _LEAVES,
    lambda inner: st.tuples(st.sampled_from(["$and", "$or"]), st.lists(inner, max_size=3)).map(
        lambda pair: {pair[0]: pair[1]}
    ),
    max_leaves=6,
)
