"""Shards of a task: their names, what is split among them, and what their numbers are together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.shards import (
    MAX_SHARDS,
    Shard,
    add_up,
    check_shards,
    check_task_name,
    shard_names,
    shard_of,
    shards_among,
    split,
    task_of,
)
from rollq.buffer.store.keys import task_keys

COUNTS = st.integers(1, MAX_SHARDS)


@given(st.integers(0, 5000), COUNTS)
def test_a_split_has_the_sum_and_is_even(groups: int, total: int) -> None:
    parts = split(groups, total)
    assert (len(parts), sum(parts)) == (total, groups)
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


@given(st.from_regex(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,50}", fullmatch=True), COUNTS)
def test_a_shard_knows_its_task(task: str, total: int) -> None:
    if task_of(task) != task:
        with pytest.raises(ConfigError, match="choose another"):
            check_task_name(task)
        return
    names = shard_names(check_task_name(task), total)
    assert [shard_of(name) for name in names] == [Shard(task, number, total) for number in range(1, total + 1)]


def test_names_that_a_shard_may_have_are_no_names_of_tasks() -> None:
    assert shard_names("math", 3) == ["math.1of3", "math.2of3", "math.3of3"]
    for name in ("math.1of3", "a.b.12of64"):
        with pytest.raises(ConfigError, match="belong to shards"):
            check_task_name(name)
    for name in ("math", "math.1", "1of3", "math-1of3", "math.0of3"):
        assert check_task_name(name) == name
    with pytest.raises(ConfigError, match="1 to 64 characters"):
        shard_names("m" * 60, 3)


def test_a_task_is_found_by_its_name_and_by_that_of_a_shard() -> None:
    known = ["code", "math.1of2", "math.2of2"]
    assert shards_among(known, "math") == ["math.1of2", "math.2of2"]
    assert shards_among(known, "math.2of2") == ["math.2of2"]
    assert shards_among(known, "code") == ["code"]
    assert shards_among(known, "mat") == []


@pytest.mark.parametrize(
    ("known", "wanted", "problem"),
    [
        ([], ["math.1of2", "math.2of2"], None),
        (["math.1of2"], ["math.1of2", "math.2of2"], None),
        (["math.1of2", "code"], ["math.1of2", "math.2of2"], None),
        (["math"], ["math.1of2", "math.2of2"], "shards = 1, the settings ask for shards = 2"),
        (["math.1of2"], ["math"], "shards = 2, the settings ask for shards = 1"),
        (["math.1of2"], ["math.1of3", "math.2of3", "math.3of3"], "shards = 2, the settings ask for shards = 3"),
    ],
)
def test_another_number_of_shards_is_refused(known: list[str], wanted: list[str], problem: str | None) -> None:
    if problem is None:
        check_shards(known, wanted)
    else:
        with pytest.raises(RunMismatch, match=problem):
            check_shards(known, wanted)


def test_numbers_of_shards_are_added_by_name() -> None:
    assert add_up([{"a": 1.0, "b": 2.0}, {}, {"b": 0.5}]) == {"a": 1, "b": 2.5}


@pytest.mark.parametrize(("total", "primaries", "most"), [(3, 3, 2), (4, 3, 2), (8, 3, 4), (4, 4, 1), (8, 4, 2)])
def test_shards_spread_over_the_primaries_whatever_the_run_is_called(total: int, primaries: int, most: int) -> None:
    for run in range(300):
        slots = [key_slot(task_keys(f"run-{run}", name).clock.encode()) for name in shard_names("math", total)]
        serving = [slot * primaries // 16384 for slot in slots]
        assert max(serving.count(primary) for primary in range(primaries)) <= most
