"""Samples for tests of what stores them: any that hypothesis draws, and plain ones."""

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan

PROFILE = settings(derandomize=True, max_examples=100, deadline=None, database=None)

DTYPES = ["?", "i1", "i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc/", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
JSON_OBJECTS = st.dictionaries(st.text("abc/", max_size=3), JSON, max_size=3)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    spans = draw(st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(1, 5)), max_size=3))
    tokens = sum(span.tokens for span in spans)
    ids = hnp.from_dtype(np.dtype(np.int32), min_value=0)
    return Segment(
        prompt_ids=draw(hnp.arrays(np.int32, st.integers(1, 5), elements=ids)),
        response_ids=draw(hnp.arrays(np.int32, tokens, elements=ids)),
        logprobs=draw(hnp.arrays(np.float32, tokens, elements=st.floats(-1024, 0, width=32))),
        versions=tuple(spans),
        loss_mask=draw(st.none() | hnp.arrays(np.bool_, tokens)),
        arrays=draw(st.dictionaries(st.text(max_size=4).filter(str.isprintable), ARRAYS, max_size=3)),
    )


SAMPLES = st.builds(
    Sample,
    segments=st.lists(segments(), max_size=3).map(tuple),
    status=st.sampled_from(SampleStatus),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reward_parts=st.dictionaries(st.text("ab", max_size=2), st.floats(allow_nan=False, allow_infinity=False)),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    error=st.none() | st.text("ab\n", max_size=3),
    failure=st.none() | st.sampled_from(FailureKind),
    sampling=JSON_OBJECTS,
    extra=JSON_OBJECTS,
    session_id=st.none() | st.text("ab/", max_size=3),
    tools=st.lists(JSON_OBJECTS, max_size=2).map(tuple),
    tool_choice=st.none() | st.just("auto") | JSON_OBJECTS,
)


def a_segment(tokens: int = 4, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "prompt_ids": np.arange(3, dtype=np.int32),
        "response_ids": np.arange(10, 10 + tokens, dtype=np.int32),
        "logprobs": np.linspace(-2, 0, tokens, dtype=np.float32),
        "versions": (VersionSpan(0, 7, tokens),),
    }
    return Segment(**(fields | changes))


def a_sample(*segments: Segment, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "segments": segments or (a_segment(),),
        "status": SampleStatus.COMPLETED,
        "finish_reason": FinishReason.STOP,
        "reward": 0.5,
        "reward_parts": {"exact": 1.0, "length": -0.5},
        "text": "42",
        "sampling": {"temperature": 1.0, "seed": None},
    }
    return Sample(**(fields | changes))


def assert_same_array(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def assert_same_sample(got: Sample, expected: Sample) -> None:
    for name in (field.name for field in fields(Sample) if field.name != "segments"):
        value = getattr(got, name)
        assert value == getattr(expected, name)
        assert repr(value) == repr(getattr(expected, name))
    assert len(got.segments) == len(expected.segments)
    for mine, theirs in zip(got.segments, expected.segments, strict=True):
        for name in ("prompt_ids", "response_ids", "logprobs"):
            assert_same_array(getattr(mine, name), getattr(theirs, name))
        assert mine.versions == theirs.versions
        assert all(type(span) is VersionSpan for span in mine.versions)
        assert (mine.loss_mask is None) == (theirs.loss_mask is None)
        if mine.loss_mask is not None:
            assert_same_array(mine.loss_mask, theirs.loss_mask)
        assert mine.arrays.keys() == theirs.arrays.keys()
        for name, array in theirs.arrays.items():
            assert_same_array(mine.arrays[name], array)
