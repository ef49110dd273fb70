"""The text of single tokens adds up to the text of all, also where a character consists of several."""

from collections.abc import Sequence

import pytest

from rollq.monitor.dashboard.token_text import pieces

TEXT = "größer 數學 🙂 end"


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_the_pieces_add_up_to_the_text_and_each_is_where_its_last_token_is() -> None:
    ids = list(TEXT.encode())
    found = pieces(decode, ids, 0, len(ids))
    assert len(found) == len(ids)
    assert "".join(found) == TEXT
    assert found[:5] == ["g", "r", "", "ö", ""]


@pytest.mark.parametrize("start", range(0, 20, 3))
def test_a_stretch_has_the_pieces_that_the_whole_has(start: int) -> None:
    ids = list(TEXT.encode())
    assert pieces(decode, ids, start, start + 7) == pieces(decode, ids, 0, len(ids))[start : start + 7]


def test_a_token_that_is_no_text_shows_nothing() -> None:
    assert pieces(decode, [0xFF, 65], 0, 2) == ["", "\ufffdA"]
    assert pieces(decode, [], 0, 5) == []
