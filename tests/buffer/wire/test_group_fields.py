"""What Redis holds of a group: one frame when it is whole, otherwise frames of samples, which count before it."""

from dataclasses import replace

import numpy as np
import pytest

from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, WHOLE, Sample, SampleStatus
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.group_fields import decode_group, decode_kept, encode_payload, encode_whole
from support.made_samples import a_sample, a_segment, assert_same_sample

PAIR = (a_sample(text="one"), a_sample(text="two", reward=-1.0))
FAILED = Sample(segments=(), status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="broken")
ODD = {"empty": np.zeros((0, 3)), "one": np.ones(()), "turned": np.arange(6).reshape(2, 3).T, "flags": np.ones(3, bool)}
ABORTED = replace(PAIR[0], status=SampleStatus.ABORTED, reward=None)


def test_a_whole_group_is_one_frame() -> None:
    stored = encode_payload((*PAIR, FAILED), [2], group_size=3)
    assert stored.keys() == {WHOLE}
    for got, expected in zip(decode_group(stored, group_size=3), (*PAIR, FAILED), strict=True):
        assert_same_sample(got, expected)


@pytest.mark.parametrize("unfinished", [ABORTED, EMPTY_SAMPLE])
def test_a_group_that_is_continued_has_a_frame_for_each_new_sample(unfinished: Sample) -> None:
    stored = encode_payload((*PAIR, unfinished), [1, 2], group_size=3)
    assert stored == {"1": encode_samples([PAIR[1]]), "2": encode_samples([unfinished])}


def test_a_later_frame_of_a_sample_counts() -> None:
    """A sample that was too old is made again, and interrupted."""
    stored = encode_payload(PAIR, [0, 1], group_size=2) | {"0": encode_samples([ABORTED])}
    first, second = decode_kept(stored, "ac", "group 1")
    assert_same_sample(first, ABORTED)
    assert_same_sample(second, PAIR[1])


def test_a_sample_that_was_reset_is_empty_though_its_frame_is_there() -> None:
    stored = encode_payload(PAIR, [0, 1], group_size=2)
    first, second = decode_kept(stored, "pc", "group 1")
    assert first is EMPTY_SAMPLE
    assert_same_sample(second, PAIR[1])


def test_a_frame_that_cannot_be_read_has_its_samples_made_again(caplog: pytest.LogCaptureFixture) -> None:
    stored = {WHOLE: b"RQSF" + bytes(40), "0": encode_samples([ABORTED])}
    first, second = decode_kept(stored, "ac", "group 7 of task 'math'")
    assert_same_sample(first, ABORTED)
    assert second is EMPTY_SAMPLE
    assert "group 7 of task 'math': the frame of its samples cannot be read; they are generated again" in caplog.text


def test_a_part_that_is_lost_does_not_bring_back_what_was_reset() -> None:
    stored = encode_payload(PAIR, [0, 1], group_size=2)
    first, second = decode_kept(stored, "ac", "group 1")
    assert first is EMPTY_SAMPLE
    assert_same_sample(second, PAIR[1])


def test_a_whole_group_that_lacks_samples_is_corrupt() -> None:
    stored = encode_payload(PAIR, [0, 1], group_size=2)
    with pytest.raises(CorruptFrame, match="2 samples in the store, and 3 are needed"):
        decode_group(stored, group_size=3)
    with pytest.raises(CorruptFrame, match=r"samples \['0'\] in the store, and 2 are needed"):
        decode_group({"0": encode_samples([PAIR[0]])}, group_size=2)


def test_a_group_that_cannot_be_trained_on_is_not_encoded() -> None:
    with pytest.raises(InvalidGroup, match="sample 0: reward is missing"):
        encode_payload([a_sample(reward=None)], [0], group_size=1)
    with pytest.raises(InvalidGroup, match="the group has 1 samples, its task's group_size is 2"):
        encode_payload(PAIR[:1], [0], group_size=2)
    with pytest.raises(InvalidGroup, match=r"sample 0: sampling\['temperature'\] is 'warm'"):
        encode_payload([a_sample(sampling={"temperature": "warm"})], [0], group_size=1)


def test_an_error_in_a_group_names_the_sample() -> None:
    bad = a_sample(extra={1: 2})
    with pytest.raises(InvalidGroup, match="sample 1: extra cannot be written as JSON"):
        encode_payload((PAIR[0], bad), [0, 1], group_size=2)
    with pytest.raises(InvalidGroup, match="sample 1: extra cannot be written as JSON"):
        encode_payload((ABORTED, bad), [0, 1], group_size=2)


def test_a_group_above_the_limit_is_refused_with_both_sizes() -> None:
    size = len(encode_payload(PAIR, [0, 1], group_size=2)[WHOLE])
    assert encode_payload(PAIR, [0, 1], group_size=2, max_bytes=size)
    with pytest.raises(InvalidGroup, match=f"{size} bytes encoded, more than the limit of {size - 1}"):
        encode_payload(PAIR, [0, 1], group_size=2, max_bytes=size - 1)


def test_a_group_that_is_continued_counts_as_a_whole_against_the_limit() -> None:
    group = (*PAIR, ABORTED)
    size = sum(map(len, encode_payload(group, [0, 1, 2], group_size=3).values()))
    assert encode_payload(group, [2], group_size=3, max_bytes=size).keys() == {"2"}
    with pytest.raises(InvalidGroup, match=f"{size} bytes encoded"):
        encode_payload(group, [2], group_size=3, max_bytes=size - 1)


@pytest.mark.parametrize("group", [PAIR, (*PAIR, FAILED), (a_sample(a_segment(arrays=ODD)), a_sample())])
def test_a_frame_in_pieces_has_the_bytes_of_a_joined_one(group: tuple[Sample, ...]) -> None:
    size = len(group)
    joined = encode_payload(group, range(size), group_size=size)[WHOLE]
    pieces = encode_whole(group, group_size=size)
    assert bytes(pieces) == b"".join(pieces.parts) == joined
    assert len(pieces) == len(joined)
    with pytest.raises(InvalidGroup, match="more than the limit"):
        encode_whole(group, group_size=size, max_bytes=len(joined) - 1)
