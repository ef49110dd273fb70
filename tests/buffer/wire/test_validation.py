"""What cannot be trained on does not enter the buffer, and the error names the field and the sample."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire.validation import check_group

VOCAB_SIZE = 100


def a_segment(tokens: int = 4, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "prompt_ids": np.arange(3, dtype=np.int32),
        "response_ids": np.arange(10, 10 + tokens, dtype=np.int32),
        "logprobs": np.full(tokens, -0.5, np.float32),
        "versions": (VersionSpan(0, 7, tokens),) if tokens else (),
    }
    return Segment(**(fields | changes))


def a_sample(*segments: Segment, **changes: Any) -> Sample:
    fields: dict[str, Any] = {"segments": segments or (a_segment(),), "status": SampleStatus.COMPLETED, "reward": 1.0}
    return Sample(**(fields | changes))


def check(*samples: Sample) -> None:
    check_group(samples, group_size=len(samples), vocab_size=VOCAB_SIZE)


def with_entry(array: Any, index: int, value: float) -> Any:
    changed = array.copy()
    changed[index] = value
    return changed


IDS = np.arange(10, 14, dtype=np.int32)
LOGPROBS = np.full(4, -0.5, np.float32)


def test_a_group_of_every_kind_of_sample_is_accepted() -> None:
    agent = a_sample(a_segment(5, loss_mask=np.array([True, False, True, True, True])), a_segment(0), a_segment(2))
    two_versions = a_segment(versions=(VersionSpan(0, 3, 1), VersionSpan(1, 4, 3)))
    partial = a_sample(two_versions, status=SampleStatus.ABORTED, reward=None)
    broken = Sample(
        segments=(), status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="the judge raised ValueError"
    )
    check(a_sample(), agent, partial, broken, EMPTY_SAMPLE, a_sample(reward=-3, reward_parts={"format": 0.0}))


def test_groups_without_tokens_are_accepted() -> None:
    check()
    check(EMPTY_SAMPLE, EMPTY_SAMPLE)
    check(a_sample(a_segment(0), status=SampleStatus.ABORTED, reward=None))


def test_boundary_values_are_accepted() -> None:
    extreme = np.array([0, VOCAB_SIZE - 1, 0, 0], np.int32)
    rounding = np.array([0.0, -0.0, 1e-6, -3e38], np.float32)
    check(a_sample(a_segment(response_ids=extreme, logprobs=rounding)))
    largest = a_segment(response_ids=np.full(4, 2**31 - 1, np.int32))
    check_group([a_sample(largest)], group_size=1)


def test_the_number_of_samples_must_be_the_group_size() -> None:
    with pytest.raises(InvalidGroup, match="the group has 2 samples, its task's group_size is 8"):
        check_group([EMPTY_SAMPLE] * 2, group_size=8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": with_entry(LOGPROBS, 2, np.nan)}, r"logprobs\[2\] is nan"),
        ({"logprobs": with_entry(LOGPROBS, 3, -np.inf)}, r"logprobs\[3\] is -inf"),
        ({"logprobs": with_entry(LOGPROBS, 0, np.inf)}, r"logprobs\[0\] is inf"),
        ({"logprobs": with_entry(LOGPROBS, 1, 0.25)}, r"logprobs\[1\] is 0.25"),
        ({"logprobs": LOGPROBS[:3]}, "logprobs has 3 entries for 4 response_ids"),
        (
            {"logprobs": LOGPROBS.astype(np.float64)},
            r"logprobs is float64 \[4\], expected a one-dimensional .* float32",
        ),
        ({"logprobs": LOGPROBS.tolist()}, "logprobs is list"),
        ({"logprobs": LOGPROBS.reshape(4, 1)}, r"logprobs is float32 \[4, 1\]"),
        ({"response_ids": with_entry(IDS, 3, -1)}, r"response_ids\[3\] is -1; ids go from 0 to 99"),
        ({"response_ids": with_entry(IDS, 2, VOCAB_SIZE)}, r"response_ids\[2\] is 100; ids go from 0 to 99"),
        ({"response_ids": IDS.astype(np.int64)}, r"response_ids is int64 \[4\]"),
        ({"response_ids": IDS.reshape(2, 2)}, r"response_ids is int32 \[2, 2\]"),
        ({"prompt_ids": np.array([1, -5], np.int32)}, r"prompt_ids\[1\] is -5"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids is empty"),
        ({"prompt_ids": [1, 2]}, "prompt_ids is list"),
        ({"loss_mask": np.ones(3, np.bool_)}, "loss_mask has 3 entries for 4 response_ids"),
        ({"loss_mask": np.ones(4, np.uint8)}, r"loss_mask is uint8 \[4\]"),
        ({"loss_mask": [True] * 4}, "loss_mask is list"),
        ({"versions": (VersionSpan(0, 7, 3),)}, "versions cover 3 tokens of 4 response_ids"),
        ({"versions": ()}, "versions cover 0 tokens of 4 response_ids"),
        ({"versions": (VersionSpan(0, -1, 4),)}, "version=-1.*count from 0"),
        ({"versions": (VersionSpan(-1, 0, 4),)}, "epoch=-1.*count from 0"),
        ({"versions": (VersionSpan(0, 0, 5), VersionSpan(0, 1, -1))}, "tokens=-1.*tokens from 1"),
        ({"versions": (VersionSpan(0, 0, 4), VersionSpan(0, 1, 0))}, "tokens=0.*tokens from 1"),
        ({"versions": (VersionSpan(0, 1.0, 4),)}, "plain ints are needed"),  # type: ignore[arg-type]
        ({"versions": (VersionSpan(0, None, 4),)}, "plain ints are needed"),  # type: ignore[arg-type]
        ({"versions": ((0, 4),)}, r"\(0, 4\), expected a VersionSpan"),
    ],
)
def test_a_bad_segment_is_refused_by_field(changes: dict[str, Any], problem: str) -> None:
    bad = a_segment(**changes)
    with pytest.raises(InvalidGroup, match=f"sample 2: {'.*' if 'versions' in changes else ''}{problem}"):
        check(a_sample(), a_sample(), a_sample(bad))
    with pytest.raises(InvalidGroup, match=rf"sample 0: segments\[1\]\..*{problem}"):
        check(a_sample(a_segment(), bad), a_sample())


@pytest.mark.parametrize("status", SampleStatus)
def test_bad_values_are_refused_in_samples_of_every_status(status: SampleStatus) -> None:
    bad = a_segment(logprobs=with_entry(LOGPROBS, 2, np.nan))
    sample = a_sample(bad, status=status, failure=FailureKind.TOOL if status is SampleStatus.FAILED else None)
    with pytest.raises(InvalidGroup, match=r"sample 0: logprobs\[2\] is nan"):
        check(sample)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reward": None}, "reward is missing in a completed sample"),
        ({"reward": float("nan")}, "reward is nan, expected a finite number of 32 bits"),
        ({"reward": float("-inf")}, "reward is -inf"),
        ({"reward": np.float32("nan")}, r"reward is .*nan"),
        ({"reward": "1.0"}, "reward is '1.0', expected a finite number of 32 bits"),
        ({"reward": 10**400}, "reward is 1000"),
        ({"reward": -1e39}, r"reward is -1e\+39, expected a finite number of 32 bits"),
        ({"reward_parts": {"exact": 1.0, "format": float("nan")}}, r"reward_parts\['format'\] is nan"),
        ({"reward_parts": {"exact": None}}, r"reward_parts\['exact'\] is None"),
        ({"failure": FailureKind.TOOL}, "failure is 'tool', but its status is completed"),
        (
            {"status": SampleStatus.FAILED},
            "failure is missing in a failed sample: must be one of prompt, provider, context",
        ),
        ({"status": SampleStatus.FAILED, "failure": "tool"}, "failure is 'tool', expected a FailureKind"),
        ({"segments": ()}, "response_ids is empty in a completed sample"),
        ({"segments": (a_segment(0), a_segment(0))}, "response_ids is empty in a completed sample"),
    ],
)
def test_a_bad_sample_is_refused_by_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidGroup, match=f"sample 1: {problem}"):
        check(a_sample(), replace(a_sample(), **changes))


def test_a_sample_that_is_not_completed_needs_neither_reward_nor_tokens() -> None:
    for status in (SampleStatus.PENDING, SampleStatus.ABORTED):
        check(a_sample(status=status, reward=None, segments=()))
    check(a_sample(status=SampleStatus.FAILED, failure=FailureKind.TOOL, reward=None, segments=()))


def test_a_sample_that_was_left_out_needs_no_kind_of_failure() -> None:
    check(a_sample(status=SampleStatus.FAILED, finish_reason=FinishReason.ABORT, reward=None, segments=()))


def test_a_reward_that_is_not_finite_is_refused_even_in_a_failed_sample() -> None:
    with pytest.raises(InvalidGroup, match="sample 0: reward is nan"):
        check(a_sample(status=SampleStatus.FAILED, failure=FailureKind.TOOL, reward=float("nan")))


def test_every_position_of_a_bad_value_is_found() -> None:
    group = [a_sample(a_segment(), a_segment(3)), a_sample(), a_sample(a_segment(6))]
    for sample_index, sample in enumerate(group):
        for segment_index, segment in enumerate(sample.segments):
            for token in range(len(segment.response_ids)):
                bad = replace(segment, logprobs=with_entry(segment.logprobs, token, np.nan))
                segments = [*sample.segments]
                segments[segment_index] = bad
                samples = [*group]
                samples[sample_index] = replace(sample, segments=tuple(segments))
                with pytest.raises(InvalidGroup, match=rf"sample {sample_index}: .*logprobs\[{token}\] is nan"):
                    check(*samples)
