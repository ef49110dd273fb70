"""Validates groups before they enter the buffer. `put` and `insert` call this, and all later code relies on it.

Most groups are valid, and one pass over all samples checks them with few numpy calls: a call on a short array costs
about as much as the rest of its sample. Only an invalid group is searched for the offender.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan, unversioned
from rollq.buffer.values.sample_columns import temperature_of

SHORT_ENTRIES = 4096
"""Arrays that are shorter than this on average are checked together."""
LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed 0 by this much, due to float32 rounding in a log-softmax."""

MOST_VERSIONS = (1 << 31) - 1
"""Epochs and versions are int32 in batches."""

MOST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are float32 in batches: a larger reward would be infinite, and its group's advantages would be NaN."""

_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


def check_group(
    samples: Sequence[Sample], *, group_size: int, vocab_size: int | None = None, inserted: bool = False
) -> None:
    """Raise `InvalidGroup`, naming the sample and the field, unless every sample can be trained on or kept.

    Every sample: arrays of the dtype and shape that `Segment` states; logprobs, loss mask and version spans that cover
    the response ids; finite logprobs, not above 0; ids from 0 and below `vocab_size`; versions from 0; a reward that
    is finite as a float32, or absent; a temperature that is a number or absent. A completed sample also has response
    ids and a reward; a failed one, and no other, has a failure, unless it was left out (finish reason `abort`).

    The samples of an `inserted` group have all completed, and are `unversioned`; a segment's logprobs may be absent:
    all NaN.
    """
    if len(samples) != group_size:
        raise InvalidGroup(f"the group has {len(samples)} samples, its task's group_size is {group_size}")
    for index, sample in enumerate(samples):
        problem = _sample_problem(sample, inserted)
        if problem is not None:
            raise InvalidGroup(f"sample {index}: {problem}")
    segments = [segment for sample in samples for segment in sample.segments]
    with_logprobs = [segment for segment in segments if not (inserted and has_no_logprobs(segment))]
    if segments and not (_ids_are_good(segments, vocab_size) and _logprobs_are_good(with_logprobs)):
        raise InvalidGroup(_bad_value(samples, vocab_size, inserted))


def has_no_logprobs(segment: Segment) -> bool:
    """Whether a segment's logprobs are absent: all NaN."""
    return bool(np.isnan(segment.logprobs).all())


def _sample_problem(sample: Sample, inserted: bool) -> str | None:
    """The problem with a sample's form, or None; the values in its arrays are checked later."""
    if inserted and sample.status is not SampleStatus.COMPLETED:
        return f"its status is {sample.status.name.lower()}, and only completed samples can be inserted"
    for index, segment in enumerate(sample.segments):
        problem = _segment_problem(segment, inserted)
        if problem is not None:
            return f"segments[{index}].{problem}" if len(sample.segments) > 1 else problem
    if sample.status is SampleStatus.COMPLETED:
        if not any(len(segment.response_ids) for segment in sample.segments):
            return "response_ids is empty in a completed sample"
        if sample.reward is None:
            return "reward is missing in a completed sample"
    return _failure_problem(sample) or _reward_problem(sample) or _temperature_problem(sample)


def _failure_problem(sample: Sample) -> str | None:
    kind: Any = sample.failure
    if kind is None:
        if sample.status is not SampleStatus.FAILED or sample.finish_reason is FinishReason.ABORT:
            return None
        return f"failure is missing in a failed sample: must be one of {', '.join(FailureKind)}"
    if not isinstance(kind, FailureKind):
        return f"failure is {kind!r}, expected a FailureKind"
    if sample.status is not SampleStatus.FAILED:
        return f"failure is {kind.value!r}, but its status is {sample.status.name.lower()}"
    return None


def _temperature_problem(sample: Sample) -> str | None:
    try:
        temperature_of(sample)
    except InvalidGroup as error:
        return str(error)
    return None


def _reward_problem(sample: Sample) -> str | None:
    if sample.reward is not None and not _is_finite(sample.reward):
        return f"reward is {sample.reward!r}, expected a finite number of 32 bits"
    parts: Any = sample.reward_parts
    if not isinstance(parts, Mapping):
        return f"reward_parts is {parts!r}, expected a mapping"
    for name, part in parts.items():
        if not _is_finite(part):
            return f"reward_parts[{name!r}] is {part!r}, expected a finite number of 32 bits"
    return None


def _segment_problem(segment: Segment, inserted: bool) -> str | None:
    prompt, response, logprobs = segment.prompt_ids, segment.response_ids, segment.logprobs
    if not (_is_vector(prompt, _INT32) and _is_vector(response, _INT32) and _is_vector(logprobs, _FLOAT32)):
        return _wrong_vector(
            prompt_ids=(prompt, _INT32), response_ids=(response, _INT32), logprobs=(logprobs, _FLOAT32)
        )
    count = len(response)
    if len(logprobs) != count:
        return f"logprobs has {len(logprobs)} entries for {count} response_ids"
    if count and not len(prompt):
        return "prompt_ids is empty: the first response token follows nothing"
    versions_problem = _no_versions_problem if inserted else _versions_problem
    return _mask_problem(segment.loss_mask, count) or versions_problem(segment.versions, count)


def _mask_problem(mask: Any, count: int) -> str | None:
    if mask is None:
        return None
    if not _is_vector(mask, _BOOL):
        return _wrong_vector(loss_mask=(mask, _BOOL))
    return None if len(mask) == count else f"loss_mask has {len(mask)} entries for {count} response_ids"


def _versions_problem(spans: Sequence[VersionSpan], count: int) -> str | None:
    covered = 0
    for span in spans:
        if type(span) is not VersionSpan:
            return f"versions holds {span!r}, expected a VersionSpan"
        epoch, version, tokens = span
        if type(epoch) is not int or type(version) is not int or type(tokens) is not int:
            return f"versions holds {span!r}, plain ints are needed"
        if not (0 <= epoch <= MOST_VERSIONS and 0 <= version <= MOST_VERSIONS and tokens > 0):
            return f"versions holds {span!r}: epoch and version count from 0 to {MOST_VERSIONS}, tokens from 1"
        covered += tokens
    return None if covered == count else f"versions cover {covered} tokens of {count} response_ids"


def _no_versions_problem(spans: Sequence[VersionSpan], count: int) -> str | None:
    if tuple(spans) == unversioned(count):
        return None
    return f"versions is {spans!r}, but no weights of the run made inserted samples: must be unversioned({count})"


def _is_vector(array: Any, dtype: np.dtype[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1


def _wrong_vector(**fields: tuple[Any, np.dtype[Any]]) -> str:
    for name, (array, dtype) in fields.items():
        if not _is_vector(array, dtype):
            actual = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            return f"{name} is {actual}, expected a one-dimensional numpy array of {dtype}"
    raise AssertionError("called without a wrong vector")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value) and abs(value) <= MOST_REWARD
    except (TypeError, ValueError, OverflowError):
        return False


def _ids_are_good(segments: Sequence[Segment], vocab_size: int | None) -> bool:
    prompts = {id(segment.prompt_ids): segment.prompt_ids for segment in segments}  # siblings share theirs
    # as unsigned, a negative id is larger than every vocabulary: one reduction instead of two
    limit = 1 << 31 if vocab_size is None else vocab_size
    ids = in_blocks([*prompts.values(), *(segment.response_ids for segment in segments)])
    return all(not len(block) or int(block.view(np.uint32).max()) < limit for block in ids)


def _logprobs_are_good(segments: Sequence[Segment]) -> bool:
    blocks = in_blocks([segment.logprobs for segment in segments])
    # NaN passes through both reductions, and fails both comparisons
    return all(not len(block) or (block.min() > -math.inf and block.max() <= LOGPROB_TOLERANCE) for block in blocks)


def in_blocks(arrays: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Join the arrays where a call on each would cost more than the copy."""
    return [np.concatenate(arrays)] if sum(map(len, arrays)) < SHORT_ENTRIES * len(arrays) else arrays


def _bad_value(samples: Sequence[Sample], vocab_size: int | None, inserted: bool) -> str:
    """Name the first id or logprob that is out of range."""
    top = (1 << 31) - 1 if vocab_size is None else vocab_size - 1
    rules: dict[str, tuple[Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]], str]] = {
        "prompt_ids": (lambda ids: (ids < 0) | (ids > top), f"ids go from 0 to {top}"),
        "response_ids": (lambda ids: (ids < 0) | (ids > top), f"ids go from 0 to {top}"),
        "logprobs": (
            lambda logprobs: ~(np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)),
            "expected a finite number, not above 0",
        ),
    }
    for sample_index, sample in enumerate(samples):
        for segment_index, segment in enumerate(sample.segments):
            owner = f"segments[{segment_index}]." if len(sample.segments) > 1 else ""
            for name, (is_bad, rule) in rules.items():
                if name == "logprobs" and inserted and has_no_logprobs(segment):
                    continue
                array = getattr(segment, name)
                bad = np.flatnonzero(is_bad(array))
                if len(bad):
                    return f"sample {sample_index}: {owner}{name}[{bad[0]}] is {array[bad[0]]}; {rule}"
    raise AssertionError("called without a bad value")
