"""Rows of samples: what ranks compute a batch from before they read a token of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.values.sample_numbers import means, sample_numbers, together
from rollq.buffer.wire.sample_rows import SampleRows


def segment(prompt: int, spans: list[tuple[int, int, int]], mask: list[bool] | None = None, **arrays: Any) -> Segment:
    tokens = sum(span[2] for span in spans)
    return Segment(
        np.zeros(prompt, np.int32),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.float32),
        tuple(VersionSpan(*span) for span in spans),
        None if mask is None else np.array(mask),
        arrays,
    )


def sample(*segments: Segment, reward: float | None = 1.0, failed: bool = False) -> Sample:
    status, failure = (SampleStatus.FAILED, FailureKind.TOOL) if failed else (SampleStatus.COMPLETED, None)
    return Sample(segments, status, reward=reward, failure=failure)


MIXED = [
    sample(segment(3, [(1, 4, 5)])),
    sample(segment(3, [(1, 4, 2), (2, 5, 4)], [True, False, True, True, False, True]), reward=0.1),
    sample(segment(7, [(1, 4, 1)]), segment(0, []), segment(2, [(2, 5, 3)], labels=np.arange(3)), reward=-2),
    sample(segment(3, [(1, 4, 9)]), failed=True),
    sample(reward=None, failed=True),
]


def test_rows_say_what_the_loss_may_count_by_weights() -> None:
    rows = SampleRows.of(Samples.of(MIXED))
    assert rows.rewards == (1.0, 0.1, -2.0, None, None)
    assert rows.lengths == ((8,), (9,), (8, 5), (), ())
    assert rows.loss_tokens == {(1, 4): (5, 1, 1, 0, 0), (2, 5): (0, 3, 3, 0, 0)}
    assert rows.labelled == (False, False, True, False, False)


def test_rows_come_back_as_they_were() -> None:
    rows = SampleRows.of(Samples.of(MIXED))
    assert SampleRows.decode(rows.encode()) == rows
    assert orjson.loads(rows.encode()) == [
        [1.0, 0.1, -2.0, None, None], [8, 9, [8, 5], [], []], [[1, 4, 5, 1, 1, 0, 0], [2, 5, 0, 3, 3, 0, 0]], [2]
    ]  # fmt: skip


def test_numbers_of_samples_come_back_and_are_no_part_of_the_comparison() -> None:
    made = [replace(MIXED[0], reward_parts={"right": 1.0}, extra={"turns": 3, "done": True, "text": "t"}), *MIXED[1:]]
    rows = SampleRows.of(Samples.of(made), sample_numbers(made))
    assert SampleRows.decode(rows.encode()).numbers == {
        name: (value, None, None, None, None) for name, value in {"done": 1.0, "right": 1.0, "turns": 3.0}.items()
    }
    assert rows == SampleRows.of(Samples.of(MIXED))


def test_numbers_are_averaged_over_the_samples_that_have_them_and_bounded() -> None:
    many = [replace(MIXED[0], extra={f"n{number:02}": number for number in range(40)} | {"n00": float("inf")})]
    assert list(sample_numbers(many)) == [f"n{number:02}" for number in range(1, 17)]
    with_parts = [replace(many[0], reward_parts={"right": 1.0, "n00": 2.0})]
    assert list(sample_numbers(with_parts)) == ["n00", "right", *[f"n{number:02}" for number in range(1, 15)]]
    assert means(together([{"a": (1.0, None, 3.0)}, {"a": (5.0,), "b": (None,)}])) == {"a": 3.0}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_rewards_come_back_to_the_last_bit(rewards: list[float]) -> None:
    rows = SampleRows.of(Samples.of([sample(segment(1, [(0, 0, 1)]), reward=reward) for reward in rewards]))
    assert SampleRows.decode(rows.encode()).rewards == tuple(rewards)


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"{}", b"[]", b"null", b"[[1.0],[3],[[1,0,3]]]", b"[[1.0],[3,4],[[1,0,3]],[]]",
        b"[[1.0],[3],[[1,0,3,4]],[]]", b'[[1.0],[3],[[1,0,3]],[],{"a":[1,2]}]', b'[[1.0],[3],[[1,0,3]],[],7]',
        b'[[1.0],[3],[[1,0,3]],[],{"a":["x"]}]',
        b"[[1.0],[-3],[[1,0,3]],[]]", b"[[1.0],[[3.5]],[[1,0,3]],[]]", b"[[1.0],[3],[[1,0,true]],[]]",
        b"[[1.0],[3],[[1]],[]]", b'[["x"],[3],[[1,0,3]],[]]', b"[[[1]],[3],[[1,0,3]],[]]", b"[[1.0],[3],[3],[]]",
        b"[[1.0],[3],[[1,0,3]],7]", b"[[1.0],[3],[[[],0,3]],[]]", b'[[1.0],["ab"],[[1,0,3]],[]]', b"\xff\xfe",
    ],
)  # fmt: skip
def test_anything_else_is_corrupt(broken: bytes) -> None:
    with pytest.raises(CorruptFrame, match=f"rows of {len(broken)} bytes cannot be read"):
        SampleRows.decode(broken)


@given(st.data())
def test_no_change_of_bytes_does_more_than_be_noticed(data: st.DataObject) -> None:
    encoded = bytearray(SampleRows.of(Samples.of(MIXED)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows = SampleRows.decode(bytes(encoded))
    except CorruptFrame:
        return
    assert len(rows.lengths) == len(rows.rewards) == len(rows.labelled)
    assert all(len(counted) == len(rows.rewards) for counted in rows.loss_tokens.values())
