"""Makes the arguments of `put` and `salvage` from group results and sample parts.

The server does not read samples. Beside the bytes, the worker sends the numbers that the server's decisions need, such
as versions, rewards and tokens. Nothing in this module asks the server. A group or part that cannot be encoded never
fails the rest of its call: the group is put as failed, and the part is left out.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from rollq.buffer.common.portions import portions
from rollq.buffer.errors import InvalidGroup
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.rewards.credit import judged_reward
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors, brings_labels, counted_version
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    AWAY,
    BESIDE,
    EMPTY_SAMPLE,
    WHOLE,
    GroupResult,
    Lease,
    Sample,
    SamplePart,
    SampleStatus,
)
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.values.sample_numbers import sample_numbers
from rollq.buffer.wire.group_fields import encode_payload, encode_whole, is_whole
from rollq.buffer.wire.joined_frame import Pieces
from rollq.buffer.wire.parts import encode_part
from rollq.buffer.wire.plain_groups import PlainGroup, encode_plain
from rollq.buffer.wire.sample_outcomes import encode_outcomes
from rollq.buffer.wire.sample_rows import SampleRows

log = logging.getLogger(__name__)

MAX_GROUP_BYTES = 256 << 20
MAX_CALL_BYTES = 256 << 10
"""The most bytes in one call with several groups: the server files groups while later groups are encoded."""
PAYLOAD_WEIGHT = 0.25
"""Weight of a payload's bytes, which do not pass through the function: fewer calls cost less server time."""
NUMBERS_BYTES = 256
"""Approximate size of a group's arguments in a call, without its frames."""
_NO_VERSION = "-"
RESULT_ARGS = (
    "id", "attempt", "nonce", "letters", "versions", "token_versions", "oldest", "newest", "filtered", "reward",
    "rewarded", "new_tokens", "tokens", "took_ms", "error_text", "frame_count", "passed", "rewarded_tokens", "bytes",
    "rows", "counted_in", "unjudged", "failures", "samples",
)  # fmt: skip
"""One group's numbers in a `put` call, in order."""


class EncodedResult(NamedTuple):
    """A result and its frames (see `rollq.buffer.wire.group_fields`): one for the whole group, or one for each new
    sample. `plain` holds a plain group's numbers."""

    result: GroupResult
    frames: Mapping[str, bytes | Pieces]
    plain: PlainGroup | None = None


def encode_result(result: GroupResult, pieces_from: int | None = None) -> EncodedResult:
    """Encode a result; if it cannot be trained on, encode a failed result instead.

    Frames of `pieces_from` bytes or more are encoded in pieces.
    """
    lease, samples = result.lease, result.samples
    try:
        plain = encode_plain(samples) if len(samples) == len(lease.samples) else None
        if plain is not None and len(plain.frame) <= MAX_GROUP_BYTES:
            return EncodedResult(result, {WHOLE: _joined(plain.frame, pieces_from)}, plain)
        if is_whole(samples):
            whole = encode_whole(samples, group_size=len(lease.samples), max_bytes=MAX_GROUP_BYTES)
            return EncodedResult(result, {WHOLE: _joined(whole, pieces_from)})
        frames = encode_payload(samples, _new_samples(result), group_size=len(lease.samples), max_bytes=MAX_GROUP_BYTES)
    except InvalidGroup as error:
        log.warning("group %d of task %r is invalid: %s", lease.group_id, lease.task, error)
        failed = Sample((), SampleStatus.FAILED, error=str(error), failure=FailureKind.PROGRAM)
        samples = (failed,) * len(lease.samples)
        return EncodedResult(GroupResult(lease, samples, error=str(error), generate_s=result.generate_s), {})
    return EncodedResult(result, frames)


def _joined(frame: Pieces, pieces_from: int | None) -> bytes | Pieces:
    return frame if pieces_from is not None and len(frame) >= pieces_from else bytes(frame)


def _new_samples(result: GroupResult) -> list[int]:
    """The samples whose frames the buffer lacks. Putting the group drops stored sample parts."""
    lease = result.lease
    return [
        index
        for index, (sample, former) in enumerate(zip(result.samples, lease.samples, strict=False))
        if sample is not former or (lease.parts > 0 and sample is not EMPTY_SAMPLE)
    ]


def _new_failures(result: GroupResult) -> list[FailureKind]:
    """The failure kinds of the samples that failed in this attempt."""
    pairs = zip(result.samples, result.lease.samples, strict=True)
    return [new.failure for new, old in pairs if new.failure and old.status is not SampleStatus.FAILED]


def part_args(part: SamplePart, floors: Floors, rules: TaskRules) -> list[Any]:
    """The arguments of `salvage` for one part; none if the part cannot be encoded."""
    lease, sample = part.lease, part.sample
    try:
        encoded = encode_part(part)
    except InvalidGroup as error:
        log.warning("a part of group %d of task %r is invalid: %s", lease.group_id, lease.task, error)
        return []
    version, oldest = versions_of(sample, floors, rules)
    return [
        lease.group_id, lease.attempt, lease.nonce, part.number, part.index, sample.status.value,
        _text(version), _text(oldest), int(part.tokens_before == 0), encoded,
    ]  # fmt: skip


class GroupArgs(NamedTuple):
    """One group in a call: its arguments, including inline frames; the payloads to set in the same transaction, by key;
    and the external payloads to store before the call."""

    args: list[Any]
    frames: Mapping[str, bytes]
    payloads: Mapping[str, bytes] = MappingProxyType({})
    away: Mapping[PayloadName, bytes | Pieces] = MappingProxyType({})

    @property
    def size_bytes(self) -> float:
        payload_bytes = sum(map(len, self.payloads.values()))
        return NUMBERS_BYTES + sum(map(len, self.frames.values())) + PAYLOAD_WEIGHT * payload_bytes


def calls_of(groups: Iterable[GroupArgs]) -> Iterator[tuple[list[Any], dict[str, bytes]]]:
    """Yield the arguments and payloads of size-limited calls."""
    for portion in portions_of(groups):
        args: list[Any] = []
        payloads: dict[str, bytes] = {}
        for group in portion:
            args += group.args
            payloads = {**group.payloads, **payloads}  # the first of two results for one lease counts
        yield args, payloads


def portions_of(groups: Iterable[GroupArgs]) -> Iterator[list[GroupArgs]]:
    """Yield the groups of each size-limited call."""
    return portions(groups, lambda group: group.size_bytes, MAX_CALL_BYTES)


def _epochs(samples: Sequence[Sample]) -> set[int]:
    """The epochs whose weights made these samples' tokens."""
    return {span.epoch for sample in samples for segment in sample.segments for span in segment.versions}


def result_args(
    encoded: EncodedResult,
    frames: Mapping[str, bytes],
    epoch: int,
    floors: Floors,
    rules: TaskRules,
    *,
    size_bytes: int,
) -> list[Any]:
    """The arguments of `put` for one group, in the order of `read_result` in `put.lua`: numbers, then frames.

    `frames` holds names in place of payloads. `epoch` is the live epoch, and `floors` has earlier epochs' floors. If a
    single earlier epoch made all tokens, their versions are sent unchanged: they may count as newer again. `size_bytes`
    is the frames' size, including the named payloads.
    """
    result, plain = encoded.result, encoded.plain
    made_in = _epochs(result.samples) if plain is None else {weights[0] for weights in plain.loss_tokens}
    if len(made_in) == 1 and max(made_in) < epoch:
        (epoch,), floors = made_in, Floors()
    numbers = {
        "id": result.lease.group_id,
        "attempt": result.lease.attempt,
        "nonce": result.lease.nonce,
        "filtered": int(result.filtered),
        "took_ms": round(result.generate_s * 1000),
        "frame_count": len(frames),
        "bytes": size_bytes,
        "counted_in": epoch,
        **(_sample_args(result, frames, floors, rules) if plain is None else _plain_args(result, plain, floors, rules)),
    }
    return [*[numbers[name] for name in RESULT_ARGS], *chain.from_iterable(frames.items())]


def _sample_args(result: GroupResult, frames: Mapping[str, bytes], floors: Floors, rules: TaskRules) -> dict[str, Any]:
    """A put's arguments that are computed from samples, for any group."""
    lease, samples = result.lease, result.samples
    tokens = [sample.response_tokens for sample in samples]
    new = _new_samples(result) if frames else []  # an invalid group has no new samples
    return {
        "letters": "".join([sample.status for sample in samples]),
        **_version_args(samples, floors, rules),
        **_reward_args(samples, tokens, rules),
        "new_tokens": _new_tokens(lease, tokens, new),
        "tokens": sum(tokens) if not lease.evaluation else sum(_completed(samples, tokens)),
        "error_text": result.error or _first_error(samples),
        "rows": encoded_rows(samples) if frames.keys() & {WHOLE, BESIDE, AWAY} else b"",
        "unjudged": ",".join(str(index) for index, sample in enumerate(samples) if sample.awaits_judge),
        "failures": ",".join(_new_failures(result)),
        "samples": encode_outcomes(samples, tokens),
    }


def _plain_args(result: GroupResult, plain: PlainGroup, floors: Floors, rules: TaskRules) -> dict[str, Any]:
    """The same arguments for a plain group, from numbers that were read while encoding the group."""
    samples, total = result.samples, sum(plain.tokens)
    judged = [judged_reward(sample) for sample in samples] if any(sample.extra for sample in samples) else plain.rewards
    return {
        "letters": SampleStatus.COMPLETED * len(samples),
        **_plain_version_args(plain, floors, rules),
        "reward": sum(plain.rewards) / len(samples),
        "rewarded": len(samples),
        "passed": sum([(reward or 0.0) >= rules.pass_reward for reward in judged]),
        "rewarded_tokens": total,
        "new_tokens": _new_tokens(result.lease, plain.tokens, _new_samples(result)),
        "tokens": total,
        "error_text": result.error or "",
        "rows": plain.rows,
        "unjudged": "",
        "failures": "",
        "samples": plain.outcomes,
    }


def _new_tokens(lease: Lease, tokens: Sequence[int], new: Sequence[int]) -> int:
    """The number of tokens that this attempt made, in the `new` samples and in salvaged parts."""
    return sum([tokens[i] - lease.samples[i].response_tokens for i in new]) + lease.salvaged_tokens


def encoded_rows(samples: Sequence[Sample]) -> bytes:
    """The samples' rows, with each sample's numbers, as Redis holds them."""
    return SampleRows.of(Samples.of(samples), sample_numbers(samples)).encode()


def _version_args(samples: Sequence[Sample], floors: Floors, rules: TaskRules) -> dict[str, str | int]:
    """A put's version arguments.

    They hold the version that each sample counts as, the oldest of these versions, the version of each sample's oldest
    token, and the newest version of any token.
    """
    of_samples = [versions_of(sample, floors, rules) for sample in samples]
    versioned = [counted for counted, _ in of_samples if counted is not None]
    made_by = [span.version for sample in samples for segment in sample.segments for span in segment.versions]
    return {
        "versions": ",".join([_text(counted) for counted, _ in of_samples]),
        "token_versions": ",".join([_text(oldest) for _, oldest in of_samples]),
        "oldest": min(versioned, default=_NO_VERSION),
        "newest": max(made_by, default=_NO_VERSION),
    }


def _plain_version_args(plain: PlainGroup, floors: Floors, rules: TaskRules) -> dict[str, str | int]:
    """Like `_version_args`, for a plain group."""
    of_weights = [floors.counted(epoch, version) for epoch, version, *_ in plain.loss_tokens]
    if len(of_weights) == 1:
        counted, oldest = [_counted_of(of_weights, rules)] * len(plain.tokens), of_weights * len(plain.tokens)
    else:
        by_sample = [
            [version for version, tokens in zip(of_weights, column, strict=True) if tokens]
            for column in zip(*[tokens for _, _, *tokens in plain.loss_tokens], strict=True)
        ]
        counted, oldest = [_counted_of(versions, rules) for versions in by_sample], list(map(min, by_sample))
    return {
        "versions": ",".join(map(str, counted)),
        "token_versions": ",".join(map(str, oldest)),
        "oldest": min(counted),
        "newest": max([version for _, version, *_ in plain.loss_tokens]),
    }


def _counted_of(versions: Sequence[int], rules: TaskRules) -> int:
    """The version that a sample counts as when all its tokens are in the loss."""
    return counted_version(min(versions), max(versions), rules.stale_threshold, rules.token_threshold)


def _completed(samples: Sequence[Sample], tokens: Sequence[int]) -> list[int]:
    """The tokens of completed samples."""
    return [n for sample, n in zip(samples, tokens, strict=True) if _is_completed(sample)]


def _is_completed(sample: Sample) -> bool:
    return sample.status is SampleStatus.COMPLETED


def _reward_args(samples: Sequence[Sample], tokens: Sequence[int], rules: TaskRules) -> dict[str, float]:
    """The mean reward, the number of completed samples with a reward, how many of them the judge passed, and
    their number of response tokens."""
    completed = [(sample, n) for sample, n in zip(samples, tokens, strict=True) if _is_completed(sample)]
    rewarded = [(sample, n) for sample, n in completed if sample.reward is not None]
    return {
        "reward": sum([float(sample.reward or 0.0) for sample, _ in rewarded]) / len(rewarded) if rewarded else 0.0,
        "rewarded": len(rewarded),
        "passed": sum([float(judged_reward(sample) or 0.0) >= rules.pass_reward for sample, _ in rewarded]),
        "rewarded_tokens": sum([n for _, n in rewarded]),
    }


def _first_error(samples: Sequence[Sample]) -> str:
    return next((sample.error for sample in samples if sample.error and sample.status is SampleStatus.FAILED), "")


def _text(version: int | None) -> str:
    return _NO_VERSION if version is None else str(version)


def versions_of(sample: Sample, floors: Floors, rules: TaskRules) -> tuple[int | None, int | None]:
    """The version that a sample counts as (see `counted_version`), and its oldest token's version; None without
    tokens."""
    versions = [floors.counted(epoch, version) for segment in sample.segments for epoch, version, _ in segment.versions]
    if not versions:
        return None, None
    oldest = min(versions)
    if rules.token_threshold == rules.stale_threshold or brings_labels(sample.segments):
        return oldest, oldest
    in_loss = _versions_in_loss(sample, floors) or versions  # all tokens may be masked on purpose
    return counted_version(oldest, max(in_loss), rules.stale_threshold, rules.token_threshold), oldest


def _versions_in_loss(sample: Sample, floors: Floors) -> list[int]:
    """The versions of spans that have a token in the loss."""
    versions: list[int] = []
    for segment in sample.segments:
        mask, start = segment.loss_mask, 0
        for span in segment.versions:
            if mask is None or mask[start : start + span.tokens].any():
                versions.append(floors.counted(span.epoch, span.version))
            start += span.tokens
    return versions
