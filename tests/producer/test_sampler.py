import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.errors import InvalidPrompt
from rollq.producer.prompt_order import shuffled
from rollq.producer.sampler import Sampler
from support.producer_run import Rows, contents


def test_xs02_every_pass_holds_every_row_once_in_another_order_and_passes_never_end() -> None:
    sampler = Sampler(Rows(50), (7,), 1.0)
    first, second = contents(sampler.prompts_from(0, 50)), contents(sampler.prompts_from(50, 50))
    assert sorted(first) == sorted(second) == sorted(map(str, range(50)))
    assert first != second
    assert first != list(map(str, range(50)))
    assert len(sampler.prompts_from(10**12, 3)) == 3


def test_the_order_depends_on_the_seeds_alone() -> None:
    assert contents(Sampler(Rows(50), (7, 1), 1.0).prompts_from(0, 80)) == contents(
        Sampler(Rows(50), (7, 1), 1.0).prompts_from(0, 80)
    )
    assert contents(Sampler(Rows(50), (7, 1), 1.0).prompts_from(0, 50)) != contents(
        Sampler(Rows(50), (7, 2), 1.0).prompts_from(0, 50)
    )


def test_the_order_is_pinned_across_versions_and_machines() -> None:
    assert shuffled(8, (0, 0)).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]


@pytest.mark.parametrize("cut", [0, 1, 9, 10, 11, 25])
def test_xs04_a_restart_at_any_cursor_continues_with_the_identical_suffix(cut: int) -> None:
    source = Rows(10, bad=frozenset({2, 7}))
    whole = Sampler(source, (3,), 1.0).prompts_from(0, 30)
    cursor = whole[cut - 1][1] if cut else 0
    assert Sampler(source, (3,), 1.0).prompts_from(cursor, 30 - cut) == whole[cut:]


def test_xs05_bad_rows_are_skipped_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(Rows(10, bad=frozenset({2, 7})), (3,), 1.0)
    with caplog.at_level(logging.WARNING):
        found = sampler.prompts_from(0, 24)
        assert sampler.prompts_from(0, 24) == found, "asked again, it tells nothing again"
    assert not {"2", "7"} & set(contents(found))
    assert found[-1][1] >= 29
    assert sampler.rows.bad == {2, 7}
    assert sorted(record.message for record in caplog.records) == [
        "prompt skipped: rows:3: bad",
        "prompt skipped: rows:8: bad",
    ]


def test_xs05_a_bad_row_is_fatal_by_setting() -> None:
    with pytest.raises(InvalidPrompt, match="rows:3: bad"):
        Sampler(Rows(10, bad=frozenset({2})), (3,), 0.0).prompts_from(0, 10)


def test_a_source_without_any_usable_row_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(InvalidPrompt, match="none of the 3 rows is usable; the last error: rows:"):
        Sampler(Rows(3, bad=frozenset({0, 1, 2})), (3,), 1.0).prompts_from(0, 1)


def test_a_flood_of_bad_rows_is_logged_only_at_its_start(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(Rows(1000, bad=frozenset(range(1, 1000))), (3,), 1.0)
    with caplog.at_level(logging.WARNING):
        sampler.prompts_from(0, 2)
    assert len(caplog.records) == 101
    assert len(sampler.rows.bad) == 999


def test_a_negative_seed_is_a_seed_like_any_other() -> None:
    assert sorted(shuffled(100, (-1, 2)).tolist()) == list(range(100))


def sharded(rows: int, shards: int, bad: frozenset[int] = frozenset()) -> list[Sampler]:
    source = Rows(rows, bad)
    return [Sampler(source, (7,), 1.0, number=number, shards=shards) for number in range(1, shards + 1)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_shards_share_every_pass_and_keep_its_order(rows: int, shards: int) -> None:
    shards = min(rows, shards)
    parts = sharded(rows, shards)
    sizes = [len(range(index, rows, shards)) for index in range(shards)]
    for number in range(3):
        whole = contents(Sampler(Rows(rows), (7,), 1.0).prompts_from(number * rows, rows))
        found = [contents(part.prompts_from(number * n, n)) for part, n in zip(parts, sizes, strict=True)]
        assert found == [[row for row in whole if int(row) % shards == index] for index in range(shards)]


def test_a_shard_without_a_usable_row_is_an_error() -> None:
    (first, second) = sharded(4, 2, frozenset({1, 3}))
    assert contents(first.prompts_from(0, 2)) in (["0", "2"], ["2", "0"])
    with pytest.raises(InvalidPrompt, match="none of the 2 rows is usable"):
        second.prompts_from(0, 1)
