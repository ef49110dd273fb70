"""Reads frames; see `rollq.buffer.wire.frame_format`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import numpy.typing as npt
import orjson
import xxhash

from rollq.buffer.common import exact_json
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import ArrayRef, FinishReason, Int32Array, Sample, SampleStatus, Segment
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire import compiled
from rollq.buffer.wire.blob import check_vectors, decode_spans, view_tensor
from rollq.buffer.wire.frame_format import DETAILS, FRAME_VERSION, HEAD, MAGIC, PREFIX

_STATUSES = {status.value: status for status in SampleStatus}
_REASONS: dict[str | None, FinishReason | None] = {None: None, **{reason.value: reason for reason in FinishReason}}


def decode_samples(frame: bytes) -> Samples:
    """Return a frame's samples. Their arrays are read-only views of `frame`.

    Raises `CorruptFrame` for anything but a complete and unchanged frame with a known version.
    """
    data_at = _check_prefix(frame)
    try:
        header = orjson.loads(frame[HEAD.size : data_at])
        layout = orjson.loads(_text(frame, data_at, header.pop("layout")))
        details = exact_json.loads(_text(frame, data_at, header.pop("details")))
        return _decode(frame, data_at, header, layout, details)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFrame(
            f"frame of {len(frame)} bytes: the checksum is right, but the content is not samples: "
            f"{type(error).__name__}: {error}"
        ) from error


def decode_sample(frame: bytes) -> Sample:
    """Return the only sample in a frame. Raises `CorruptFrame` like `decode_samples`."""
    samples = decode_samples(frame)
    if len(samples) != 1:
        raise CorruptFrame(f"frame of {len(frame)} bytes holds {len(samples)} samples, not one")
    return samples[0]


def _check_prefix(frame: bytes) -> int:
    """Return the byte at which an intact frame's arrays begin."""
    size = len(frame)
    if size < HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes is truncated: its first fields alone take {HEAD.size}")
    magic, version, length, checksum, header_length = HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise CorruptFrame(f"frame of {size} bytes begins with {magic!r}, not with {MAGIC!r}: it is not rollq's")
    if version != FRAME_VERSION:
        raise CorruptFrame(
            f"frame of {size} bytes has schema version {version}, this rollq reads {FRAME_VERSION}: "
            "use the version of rollq that wrote it"
        )
    if length != size - PREFIX.size:
        raise CorruptFrame(f"frame of {size} bytes should have {length + PREFIX.size}: it was truncated or extended")
    digest = xxhash.xxh3_64_intdigest(memoryview(frame)[PREFIX.size :])
    if digest != checksum:
        raise CorruptFrame(f"frame of {size} bytes has xxh3_64 {digest:#018x}, not {checksum:#018x}: it was changed")
    if header_length > size - HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes claims a header of {header_length} bytes at byte {HEAD.size}")
    return HEAD.size + int(header_length)


def _check_tokens(tokens: int, ids: Any, logprobs: Any, mask: Any) -> None:
    """Raise `ValueError` unless segments with `tokens` tokens in total use the arrays exactly."""
    if tokens != len(ids) or tokens != len(logprobs) or (mask is not None and tokens != len(mask)):
        raise ValueError(f"segments have {tokens} tokens, arrays {len(ids)} ids and {len(logprobs)} logprobs")


def _decode(
    frame: bytes, data_at: int, header: dict[str, Any], layout: Mapping[str, Any], details: Mapping[str, Any]
) -> Samples:
    """Return the samples. `header` describes all tensors except the texts `layout` and `details`."""
    view = partial(view_tensor, frame, data_at)
    all_prompts, ids, logprobs = [view(header.pop(name)) for name in ("prompts", "ids", "logprobs")]
    mask: Any = view(header.pop("loss_mask")) if "loss_mask" in header else None
    check_vectors([ids, all_prompts], logprobs, mask)
    prompts, rows = _split(all_prompts, layout["prompts"]), layout["segments"]
    statuses, rewards, reasons, temperatures = layout["samples"]
    if {len(rewards), len(reasons), len(temperatures)} != {len(statuses)}:
        raise ValueError(f"{len(statuses)} samples, {len(rewards)} rewards")
    segments = None
    if mask is None and not header and layout["references"] == {}:
        segments = compiled.segments_of(len(statuses), rows, prompts, ids, logprobs)
    if segments is None:
        arrays = _named_arrays(header, layout["references"], rows, view)
        segments = _segments(len(statuses), rows, prompts, ids, logprobs, mask, arrays)
    return Samples(
        tuple([_STATUSES[status] for status in statuses]),
        _numbers(rewards, int, float, NoneType),
        tuple([_REASONS[reason] for reason in reasons]),
        _numbers(temperatures, int, float),
        segments,
        partial(_objects, _columns(details, len(statuses))),
    )


def _named_arrays(
    header: Mapping[str, Any], references: Mapping[str, Any], rows: Sequence[Any], view: Callable[[Any], Any]
) -> list[dict[str, npt.NDArray[Any] | ArrayRef]]:
    """Each segment's named arrays, which the rest of the header and the references describe."""
    arrays: list[dict[str, npt.NDArray[Any] | ArrayRef]] = [{} for _ in rows]
    for index, of_segment in references.items():
        arrays[_index(int(index), rows)].update(_decode_references(of_segment))
    for key, entry in header.items():
        owner, _, name = key.partition("/")
        arrays[_index(int(owner[1:]), rows)][name] = view(entry)
    return arrays


def _segments(
    count: int, rows: Sequence[Any], prompts: Sequence[Int32Array], ids: Any, logprobs: Any, mask: Any, arrays: Any
) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each of `count` samples."""
    segments: list[list[Segment]] = [[] for _ in range(count)]
    start = 0
    for (sample, prompt, tokens, masked, spans), named in zip(rows, arrays, strict=True):
        if sample < 0 or prompt < 0:  # lists would accept negative indices
            raise ValueError(f"a segment of prompt {prompt} in sample {sample}")
        end = start + tokens
        segments[sample].append(
            Segment(
                prompts[prompt],
                ids[start:end],
                logprobs[start:end],
                decode_spans(spans, tokens),
                mask[start:end] if masked else None,
                named,
            )
        )
        start = end
    _check_tokens(start, ids, logprobs, mask)
    return tuple(map(tuple, segments))


def _index(index: int, owners: Sequence[Any]) -> int:
    """Return `index`, which must be an index of `owners`: numpy and lists would accept a negative index."""
    if not 0 <= index < len(owners):
        raise ValueError(f"{index} is none of {len(owners)}")
    return index


def _numbers(values: Sequence[Any], *kinds: type) -> tuple[Any, ...]:
    """Convert the values to floats; None stays None. Raises `ValueError` for a value whose type is not in `kinds`."""
    if not set(map(type, values)).issubset(kinds):
        raise ValueError(f"{values!r} are not numbers")
    return tuple([None if value is None else float(value) for value in values])


def _columns(details: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """For each field in `details`, one value per sample. Raises `ValueError` for a value with another type."""
    shared, each = details["shared"], details["each"]
    columns = {}
    for name, types in DETAILS.items():
        values = [shared[name]] if name in shared else list(each[name])
        if name == "failure":
            values = [kind and FailureKind(kind) for kind in values]
        if not set(map(type, values)).issubset(types):
            raise ValueError(f"{name} of {count} samples is {values!r}")
        columns[name] = values * count if name in shared else values
        if len(columns[name]) != count:
            raise ValueError(f"{count} samples have {len(columns[name])} values of {name}")
    return columns


def _objects(columns: Mapping[str, list[Any]], samples: Samples) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            segments=samples.segments[i],
            status=samples.statuses[i],
            finish_reason=samples.reasons[i],
            reward=samples.rewards[i],
            reward_parts=dict(columns["reward_parts"][i]),  # siblings may share it
            text=columns["text"][i],
            error=columns["error"][i],
            failure=columns["failure"][i],
            sampling=dict(columns["sampling"][i]),
            extra=dict(columns["extra"][i]),
            session_id=columns["session_id"][i],
            tools=tuple(columns["tools"][i]),
            tool_choice=columns["tool_choice"][i],
        )
        for i in range(len(samples))
    )


def _split(flat: Int32Array, lengths: Sequence[int]) -> list[Int32Array]:
    """Split `flat` into arrays with these lengths. Raises `ValueError` unless the lengths add up."""
    arrays, start = [], 0
    for length in lengths:
        if not 0 <= length <= len(flat) - start:
            raise ValueError(f"a length of {length} in {len(flat)} ids")
        arrays.append(flat[start : start + length])
        start += length
    if start != len(flat):
        raise ValueError(f"lengths add up to {start} of {len(flat)} ids")
    return arrays


def _text(frame: bytes, data_at: int, entry: Mapping[str, Any]) -> bytes:
    begin, end = entry["data_offsets"]
    return frame[data_at + begin : data_at + end]


def _decode_references(found: Mapping[str, Any]) -> dict[str, ArrayRef]:
    return {name: ArrayRef(uri, sha256, tuple(shape), dtype) for name, (uri, sha256, shape, dtype) in found.items()}
