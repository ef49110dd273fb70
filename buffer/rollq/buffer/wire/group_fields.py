"""The hash fields in which Redis holds a group's samples, each with a frame.

A whole group has one field, `WHOLE`, with the frame of all its samples. A large frame is a separate key instead, so
that it need not pass through a function (see `lua/common/samples.lua`).

A group that waits to be continued has a field for each sample that was put alone, named by the sample's index. Fields
from `group_size` on hold salvaged parts (see `rollq.buffer.wire.parts`). All these fields take precedence over the same
sample in `WHOLE`.
"""

import logging
from collections.abc import Mapping, Sequence

from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, WHOLE, Sample, SampleStatus
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire import compiled
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import check_details, encode_in_pieces, encode_samples
from rollq.buffer.wire.joined_frame import Pieces
from rollq.buffer.wire.parts import decode_parts
from rollq.buffer.wire.validation import check_group

log = logging.getLogger(__name__)

UNFINISHED = (SampleStatus.PENDING, SampleStatus.ABORTED)
"""Statuses of samples that are still to be generated."""
MOST_INLINE_BYTES = 32 << 10
"""A whole group's frame that is larger becomes a payload."""


def encode_payload(
    samples: Sequence[Sample],
    new: Sequence[int],
    *,
    group_size: int,
    vocab_size: int | None = None,
    max_bytes: int | None = None,
) -> dict[str, bytes]:
    """Check a group (see `check_group`), and return the fields to store: the whole group's field if all samples have
    ended, otherwise the `new` samples' fields.

    Raises `InvalidGroup`, including for frames that together exceed `max_bytes`.
    """
    check_group(samples, group_size=group_size, vocab_size=vocab_size)
    if is_whole(samples):
        frames = {WHOLE: encode_samples(samples)}
    else:
        frames = {str(index): _encode_one(sample, index) for index, sample in enumerate(samples)}
    _check_size(sum(map(len, frames.values())), max_bytes)
    return frames if WHOLE in frames else {str(index): frames[str(index)] for index in new}


def encode_whole(
    samples: Sequence[Sample],
    *,
    group_size: int,
    vocab_size: int | None = None,
    max_bytes: int | None = None,
    inserted: bool = False,
) -> Pieces:
    """The frame of a whole group, as `encode_payload` makes it, without a copy of its arrays. For `inserted`, see
    `check_group`."""
    check_group(samples, group_size=group_size, vocab_size=vocab_size, inserted=inserted)
    frame = encode_in_pieces(samples)
    _check_size(len(frame), max_bytes)
    return frame


def sample_problem(sample: Sample) -> str | None:
    """Why the buffer would refuse a group because of this sample; None if it would not."""
    try:
        scan = compiled.scan((sample,))
        if scan is None:
            check_group([sample], group_size=1)
        check_details(sample, scan and scan.empty_details)
    except (InvalidGroup, TypeError, ValueError) as error:
        return str(error).removeprefix("sample 0: ")
    return None


def is_whole(samples: Sequence[Sample]) -> bool:
    """Whether all samples have ended."""
    return all(sample.status not in UNFINISHED for sample in samples)


def _check_size(total_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and total_bytes > max_bytes:
        raise InvalidGroup(f"the group takes {total_bytes} bytes encoded, more than the limit of {max_bytes} bytes")


def _encode_one(sample: Sample, index: int) -> bytes:
    try:
        return encode_samples([sample])
    except InvalidGroup as error:
        raise InvalidGroup(f"sample {index}: {error}") from error


def is_large(size_bytes: int) -> bool:
    """Whether a whole group's frame of this size becomes a payload."""
    return size_bytes > MOST_INLINE_BYTES


def frame_bytes(stored: Mapping[str, bytes], *, group_size: int) -> int:
    """The total size of a group's frames, without parts."""
    return sum(len(frame) for field, frame in stored.items() if field == WHOLE or int(field) < group_size)


def decode_group(stored: Mapping[str, bytes], *, group_size: int) -> Samples:
    """Decode a whole group's samples. Raises `CorruptFrame`, including for a group that lacks samples."""
    if stored.keys() != {WHOLE}:
        raise CorruptFrame(f"it has samples {sorted(stored)} in the store, and {group_size} are needed")
    return _decode_whole(stored, group_size)


def decode_kept(stored: Mapping[str, bytes], letters: str, name: str) -> tuple[Sample, ...]:
    """The samples that earlier attempts at a group left, by its `letters`; `EMPTY_SAMPLE` for a missing sample. Logs an
    unreadable sample and leaves it out, so that it is generated again. `name` names the group in the log.
    """
    single, whole = frames_by_index(stored), _readable(stored, len(letters), name)
    samples = [EMPTY_SAMPLE] * len(letters)
    for index in [index for index, letter in enumerate(letters) if letter != SampleStatus.PENDING]:
        try:
            sample = decode_parts(index, single, group_size=len(letters))
        except CorruptFrame as error:
            log.error("%s, sample %d is generated again: %s", name, index, error)
            continue
        if sample is None and whole is not None and whole.statuses[index] == letters[index]:
            sample = whole[index]
        samples[index] = sample or EMPTY_SAMPLE
    return tuple(samples)


def _readable(stored: Mapping[str, bytes], group_size: int, name: str) -> Samples | None:
    """The samples in the whole group's frame; None if that is missing or unreadable."""
    try:
        return _decode_whole(stored, group_size) if WHOLE in stored else None
    except CorruptFrame as error:
        log.error("%s: the frame of its samples cannot be read; they are generated again: %s", name, error)
        return None


def frames_by_index(stored: Mapping[str, bytes]) -> dict[int, bytes]:
    """The frames of single samples and of parts."""
    return {int(field): frame for field, frame in stored.items() if field != WHOLE}


def _decode_whole(stored: Mapping[str, bytes], group_size: int) -> Samples:
    samples = decode_samples(stored[WHOLE])
    if len(samples) != group_size:
        raise CorruptFrame(f"it has {len(samples)} samples in the store, and {group_size} are needed")
    return samples
