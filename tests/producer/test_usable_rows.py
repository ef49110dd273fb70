"""Rows that are usable, and the share of those that are not."""

import pytest

from rollq.buffer.calls.replies.prompts import Unusable
from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.values.rollouts import Prompt
from rollq.producer.usable_rows import MORE, MOST_REASONS, UsableRows


class Rows:
    """Rows of which some are unusable, for a reason each."""

    def __init__(self, rows: int, bad: dict[int, str]) -> None:
        self.rows = rows
        self.account = "account"
        self._bad = bad

    def prompt(self, row: int) -> Prompt:
        if row in self._bad:
            raise InvalidPrompt(f"{self.place(row)}: {self._bad[row]}; the row has []")
        return Prompt(str(row), row=row)

    def place(self, row: int) -> str:
        return f"rows:{row + 1}"


def test_unusable_rows_are_counted_by_reason_with_the_first_place() -> None:
    rows = UsableRows(Rows(100, {3: "no field 'answer'", 5: "no field 'answer'", 7: "not JSON"}), 0.05)
    assert [prompt.row for prompt in rows.prompts_from(0, 100)] == [row for row in range(100) if row not in (3, 5, 7)]
    assert rows.reasons == {"no field 'answer'": Unusable(2, "rows:4"), "not JSON": Unusable(1, "rows:8")}
    assert rows.described() == "2 x no field 'answer' (first rows:4); 1 x not JSON (first rows:8)"
    assert (rows.seen, len(rows.bad)) == (100, 3)
    assert rows.prompts_from(90, 20) == rows.prompts_from(0, 100)[90:]
    assert rows.reasons["not JSON"].rows == 1


def test_more_unusable_rows_than_allowed_are_an_error() -> None:
    rows = UsableRows(Rows(100, dict.fromkeys(range(0, 100, 10), "not JSON")), 0.05)
    with pytest.raises(
        InvalidPrompt, match=r"6 of the 51 rows .* max_bad_rows = 0\.05 .*6 x not JSON \(first rows:1\)"
    ):
        rows.prompts_from(0, 100)


def test_a_large_file_of_which_all_is_unusable_is_not_read_to_its_end() -> None:
    rows = UsableRows(Rows(1_000_000, dict.fromkeys(range(1_000_000), "not JSON")), 0.05)
    with pytest.raises(InvalidPrompt, match="51 of the 51 rows"):
        rows.prompts_from(0, 1)


def test_without_a_bound_one_usable_row_is_enough() -> None:
    assert len(UsableRows(Rows(9, dict.fromkeys(range(8), "not JSON")), 1.0).prompts_from(0, 9)) == 1
    with pytest.raises(InvalidPrompt, match="none of the 9 rows is usable; the last error: rows:9: not JSON"):
        UsableRows(Rows(9, dict.fromkeys(range(9), "not JSON")), 1.0).prompts_from(0, 9)


def test_without_a_share_the_first_unusable_row_is_an_error() -> None:
    with pytest.raises(InvalidPrompt, match="rows:3: not JSON"):
        UsableRows(Rows(1000, {2: "not JSON"}), 0.0).prompts_from(0, 1000)


def test_reasons_are_bounded() -> None:
    rows = UsableRows(Rows(100, {row: f"reason {row}" for row in range(50)}), 1.0)
    rows.prompts_from(0, 100)
    assert len(rows.reasons) == MOST_REASONS + 1
    assert rows.reasons[MORE] == Unusable(50 - MOST_REASONS, f"rows:{MOST_REASONS + 1}")
