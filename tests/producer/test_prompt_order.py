import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollq.buffer.calls.replies.prompts import PromptStats
from rollq.buffer.errors import ConfigError
from rollq.producer.prompt_order import Curriculum, PromptOrder, Shuffle, make_order, shuffled
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ByColumn, ProducerTask
from support.no_numbers import no_numbers
from support.producer_run import Rows, contents

PROFILE = settings(derandomize=True, max_examples=100, deadline=None, database=None)


def task(**changes: Any) -> ProducerTask:
    return ProducerTask(prompts=Path("none"), batch_groups=4, **changes)


NEVER = 1_000_000


def curriculum(retry_passes: int = NEVER, **changes: Any) -> Curriculum:
    return Curriculum(task(prompt_order="curriculum", **changes), retry_passes)


def tried(pass_rate: float, tries: int = 1) -> PromptStats:
    return PromptStats(tries, 8 * tries, pass_rate, pass_rate, 100.0)


def sampler(source: Rows, order: PromptOrder, known: dict[int, PromptStats]) -> Sampler:
    def stats_of(rows: Any) -> dict[int, PromptStats]:
        return {row: known[row] for row in rows if row in known}

    return Sampler(source, (3,), 1.0, order, stats_of)


@pytest.mark.parametrize(
    ("stats", "taken"),
    [
        (None, True),
        (tried(0.0), False),
        (tried(0.19), False),
        (tried(0.2), True),
        (tried(0.8), True),
        (tried(0.81), False),
        (tried(1.0), False),
    ],
)
def test_the_curriculum_takes_what_is_new_or_within_its_band(stats: PromptStats | None, taken: bool) -> None:
    assert curriculum(curriculum_low=0.2, curriculum_high=0.8).takes(7, 0, stats) is taken


@given(row=st.integers(0, 10**6), passes=st.integers(1, 9), first=st.integers(0, 50))
@PROFILE
def test_a_prompt_out_of_the_band_is_retried_every_few_passes(row: int, passes: int, first: int) -> None:
    order = curriculum(passes)
    assert sum(order.takes(row, number, tried(1.0)) for number in range(first, first + passes)) == 1


def test_every_pass_gives_a_chance_to_its_share_of_rows() -> None:
    order = curriculum(4)
    assert [sum(order.takes(row, number, tried(0.0)) for row in range(100)) for number in range(4)] == [25] * 4


def test_rows_out_of_the_band_are_passed_over_and_the_others_keep_their_order() -> None:
    known = {row: tried(0.0 if row % 2 else 0.5) for row in range(20)}
    order = [str(row) for row in shuffled(20, (3, 0)).tolist() if row % 2 == 0]
    found = sampler(Rows(20), curriculum(), known).prompts_from(0, 15)
    assert contents(found)[:10] == order
    places = [str(row) for row in shuffled(20, (3, 0)).tolist()]
    assert [places[after - 1] for _, after in found[:10]] == order, "the cursor counts what was passed over"
    assert [after > 20 for _, after in found[10:]] == [True] * 5, "the next pass begins"


@given(
    known=st.dictionaries(st.integers(0, 29), st.sampled_from([tried(0.0), tried(0.5), tried(1.0)])),
    bad=st.frozensets(st.integers(0, 29), max_size=29),
    retry=st.integers(1, 3),
    cut=st.integers(1, 70),
)
@PROFILE
def test_xs04_the_same_seed_cursor_and_statistics_give_the_same_suffix(
    known: dict[int, PromptStats], bad: frozenset[int], retry: int, cut: int
) -> None:
    order = curriculum(retry)
    whole = sampler(Rows(30, bad), order, known).prompts_from(0, 80)
    assert sampler(Rows(30, bad), order, known).prompts_from(whole[cut - 1][1], 80 - cut) == whole[cut:]
    one_by_one, cursor = [], 0
    slow = sampler(Rows(30, bad), order, known)
    for _ in range(80):
        one_by_one += slow.prompts_from(cursor, 1)
        cursor = one_by_one[-1][1]
    assert one_by_one == whole
    assert [after for _, after in whole] == sorted({after for _, after in whole}), "no place is taken twice"


def test_a_pass_of_which_nothing_would_be_taken_takes_all_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    known = {row: tried(0.0) for row in range(10)}
    with caplog.at_level(logging.WARNING):
        made = sampler(Rows(10, bad=frozenset({4})), curriculum(), known)
        found = made.prompts_from(10, 20)
        made.prompts_from(found[-1][1], 1)
    assert sorted(contents(found)[:9]) == sorted(contents(found)[9:18]) == [str(row) for row in range(10) if row != 4]
    warnings = [record.message for record in caplog.records if "order takes none" in record.message]
    assert warnings[0].startswith("the order takes none of the 10 prompts in pass 1, so the pass takes all of them")
    assert len(warnings) == 3


def test_a_band_that_holds_only_unusable_rows_does_not_loop_endlessly() -> None:
    known = {row: tried(0.5 if row < 2 else 1.0) for row in range(10)}
    found = sampler(Rows(10, bad=frozenset({0, 1})), curriculum(), known).prompts_from(0, 8)
    assert sorted(contents(found)) == [str(row) for row in range(2, 10)]


def test_the_shuffle_asks_for_no_statistics() -> None:
    def refuse(rows: Any) -> Any:
        raise AssertionError(rows)

    assert len(Sampler(Rows(10), (3,), 1.0, Shuffle(), refuse).prompts_from(0, 20)) == 20


def test_statistics_are_asked_for_only_as_far_as_is_looked() -> None:
    asked: list[int] = []

    def stats_of(rows: Any) -> dict[int, PromptStats]:
        asked.extend(rows)
        return {}

    Sampler(Rows(100_000), (3,), 1.0, curriculum(), stats_of).prompts_from(0, 64)
    assert len(asked) == 256


def test_what_was_left_out_is_logged_once_per_pass(caplog: pytest.LogCaptureFixture) -> None:
    known = {row: tried(1.0) for row in range(5)}
    made = sampler(Rows(20, bad=frozenset({9})), curriculum(), known)
    with caplog.at_level(logging.INFO, logger="rollq.producer.progress_log"):
        for _ in range(2):
            made.prompts_from(made.prompts_from(0, 12)[-1][1], 4)
    messages = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert len(messages) == 1
    assert messages[0].startswith("pass 1 over 20 prompts starts; so far ")
    assert messages[0].endswith(" and 1 are unusable")


class FileOrder:
    """The rows in the order of the file."""

    uses_stats = False

    def __init__(self, task: ProducerTask) -> None:
        self.low = task.curriculum_low

    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return np.arange(rows)

    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        return True


class WantsStats(FileOrder):
    uses_stats = True


def no_order(task: ProducerTask) -> object:
    return object()


class Forgetful(FileOrder):
    def pass_order(self, rows: int, seeds: tuple[int, ...], number: int) -> npt.NDArray[np.int64]:
        return np.arange(rows)[1:]


def test_an_order_of_ones_own_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_orders", sys.modules[__name__])
    order = make_order(task(prompt_order="my_orders.FileOrder", curriculum_low=0.4), no_numbers)
    assert isinstance(order, FileOrder)
    assert order.low == 0.4
    assert contents(Sampler(Rows(5), (3,), 1.0, order).prompts_from(3, 4)) == ["3", "4", "0", "1"]
    assert isinstance(make_order(task(), no_numbers), Shuffle)
    assert isinstance(make_order(task(prompt_order="curriculum"), no_numbers), Curriculum)


def test_an_invalid_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_orders", sys.modules[__name__])
    with pytest.raises(
        ConfigError, match="prompt order 'hardest': use curriculum, difficulty, file, random, shuffle, or a"
    ):
        make_order(task(prompt_order="hardest"), no_numbers)
    with pytest.raises(
        ConfigError, match=r'prompt_order = "my_orders.no_order": \w+ has no uses_stats, pass_order, takes; ex'
    ):
        make_order(task(prompt_order="my_orders.no_order"), no_numbers)
    with pytest.raises(ConfigError, match="needs statistics of every prompt"):
        make_order(task(prompt_order="my_orders.WantsStats", prompt_stats=False), no_numbers)


class Refusing(FileOrder):
    def takes(self, row: int, number: int, stats: PromptStats | None) -> bool:
        return False


def test_an_order_that_takes_nothing_does_not_loop_endlessly() -> None:
    assert contents(Sampler(Rows(3), (3,), 1.0, Refusing(task())).prompts_from(1, 3)) == ["1", "2", "0"]


def test_an_order_that_forgets_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Forgetful.pass_order must give each of the 5 rows once"):
        Sampler(Rows(5), (3,), 1.0, Forgetful(task())).prompts_from(0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curriculum_low": 0.9, "curriculum_high": 0.1}, "curriculum.low = 0.9 exceeds curriculum.high = 0.1"),
        ({"prompt_order": "curriculum", "prompt_stats": False}, "relies on statistics of every prompt"),
    ],
)
def test_settings_of_the_order_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**changes)


def test_orders_that_may_need_statistics_switch_them_on() -> None:
    assert not task().prompt_stats
    assert task(prompt_order="curriculum").prompt_stats
    assert task(prompt_order="a.b").prompt_stats


def test_the_order_of_the_file_is_the_same_in_every_pass() -> None:
    order = make_order(task(prompt_order="file"), no_numbers)
    assert contents(sampler(Rows(4), order, {}).prompts_from(0, 6)) == ["0", "1", "2", "3", "0", "1"]


def test_random_rows_may_come_again_before_all_have_come() -> None:
    order = make_order(task(prompt_order="random"), no_numbers)
    drawn = order.pass_order(1000, (7,), 0)
    assert 0 <= drawn.min() < drawn.max() < 1000
    assert 600 < len(set(drawn.tolist())) < 670  # 1 - 1 / e of the rows
    assert np.array_equal(drawn, order.pass_order(1000, (7,), 0))
    assert not np.array_equal(drawn, order.pass_order(1000, (7,), 1))
    assert len(sampler(Rows(5), order, {}).prompts_from(3, 40)) == 40


def test_shards_draw_random_rows_of_their_own() -> None:
    order = make_order(task(prompt_order="random"), no_numbers)
    for number in (1, 2, 3):
        shard = Sampler(Rows(10), (3,), 1.0, order, number=number, shards=3)
        assert {int(text) % 3 for text in contents(shard.prompts_from(0, 50))} == {number - 1}


@pytest.mark.parametrize(("ascending", "rows"), [(True, [2, 0, 3, 1]), (False, [1, 0, 3, 2])])
def test_rows_are_sorted_by_a_column(ascending: bool, rows: list[int]) -> None:
    numbers = {"level": np.array([1.0, 5.0, 0.5, 1.0])}
    order = make_order(task(prompt_order={"by": "level", "ascending": ascending}), numbers.__getitem__)
    assert order.pass_order(4, (1,), 3).tolist() == rows


def test_a_column_is_read_from_the_file_and_rows_without_a_number_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "meta": {"level": 2}}\n{"prompt": "b", "meta": {"level": 1.5}}\nno json\n')
    chosen = ProducerTask(
        prompts=file, batch_groups=1, answer_field="", max_bad_rows=1, prompt_order=ByColumn(by="meta.level")
    )
    with PromptFile(chosen) as prompts:
        assert prompts.numbers("meta.level") == pytest.approx([2, 1.5, np.nan], nan_ok=True)
        assert make_order(chosen, prompts.numbers).pass_order(3, (0,), 0).tolist() == [1, 0, 2]
        with pytest.raises(ConfigError, match=r'by = "prompt" \}: .*prompts.jsonl:1: expected a number, not \'a\''):
            prompts.numbers("prompt")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_column_of_an_order_need_not_be_metadata_but_must_exist(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "a", "level": 2, "x": 1}, {"prompt": "b", "level": 1, "x": 1}]
    file = tmp_path / f"prompts.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    given: dict[str, Any] = {"prompts": file, "batch_groups": 1, "answer_field": "", "metadata_fields": ("x",)}
    chosen = ProducerTask(**given, prompt_order=ByColumn(by="level"))
    with PromptFile(chosen) as prompts:
        assert make_order(chosen, prompts.numbers).pass_order(2, (0,), 0).tolist() == [1, 0]
    absent = ProducerTask(**given, prompt_order=ByColumn(by="depth"))
    with pytest.raises(ConfigError, match="prompt_order: no row has a column 'depth'"), PromptFile(absent):
        pass


@pytest.mark.parametrize(("pass_rate", "share"), [(0.0, 0.1), (1.0, 0.1), (0.5, 1.0), (0.1, 0.36), (0.9, 0.36)])
def test_prompts_of_middling_difficulty_come_more_often(pass_rate: float, share: float) -> None:
    order = make_order(task(prompt_order="difficulty"), no_numbers)
    taken = [order.takes(row, number, tried(pass_rate)) for row in range(40) for number in range(50)]
    assert sum(taken) / len(taken) == pytest.approx(share, abs=0.05)
    assert order.takes(3, 0, None)


def test_prompts_end_after_the_last_pass() -> None:
    ending = Sampler(Rows(4, bad=frozenset({3})), (3,), 1.0, passes=2)
    picks = ending.prompts_from(0, 100)
    assert sorted(contents(picks)) == ["0", "0", "1", "1", "2", "2"]
    assert ending.prompts_from(picks[-1][1], 5) == ending.prompts_from(8, 1) == []
