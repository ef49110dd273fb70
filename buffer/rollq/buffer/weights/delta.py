"""A delta: the changes in a model's safetensors files since the last version, tensor by tensor.

A delta file holds the changed tensors' compressed parts, one after another, then an index in JSON, the index's length
in 8 bytes (little-endian), and `MAGIC`. A part is the XOR of at most `PART_BYTES` bytes of a tensor, with its numbers'
bytes sorted by significance, compressed with zstd. Both versions have the same safetensors headers, file by file, so
names, dtypes, shapes and offsets are the same.

Invariant: for any delta, `apply_delta` changes nothing outside the tensors in the given files, and allocates no more
than a few times `PART_BYTES` and the index. It raises `WeightsError` for a delta with another base.
"""

import hashlib
import mmap
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import zstandard
from pydantic import BaseModel, Field, ValidationError

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import MAX_HEADER_BYTES

MAGIC = b"RQDELTA1"
PART_BYTES = 32 << 20
LEVEL = 1
"""zstd's compression level. Level 9 made a real model's deltas 13 % smaller, in five times the time."""
_WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
"""Dtype -> the size of one number, in bytes. Other dtypes count as bytes."""
_TAIL_BYTES = 8 + len(MAGIC)

Bytes = bytes | mmap.mmap
ByteArray = npt.NDArray[np.uint8]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Span(NamedTuple):
    """One tensor's bytes in its file. `width` is the size of one number, in bytes."""

    name: str
    width: int
    start: int
    stop: int

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each part of at most `PART_BYTES`."""
        return ((at, min(at + PART_BYTES, self.stop)) for at in range(self.start, self.stop, PART_BYTES))


class ChangedTensor(BaseModel):
    """Each part's compressed size, and the resulting tensor's CRC-32."""

    sizes: list[Annotated[int, Field(gt=0)]]
    crc32: int


class DeltaIndex(BaseModel):
    """A delta's index. `base` and `result` are the digests of two versions; `header` is the SHA-256 of their
    safetensors headers. `tensors` holds the changed tensors, in the order of their parts."""

    base: Sha256
    result: Sha256
    header: Sha256
    tensors: dict[str, ChangedTensor]


def can_encode(base: Sequence[Bytes], result: Sequence[Bytes]) -> bool:
    """Whether a delta can lead from `base` to `result`: these safetensors files have the same headers."""
    return [len(data) for data in base] == [len(data) for data in result] and _headers(base) == _headers(result)


def encode_delta(base: Sequence[Bytes], result: Sequence[Bytes], digests: tuple[str, str], file: BinaryIO) -> None:
    """Write the delta between safetensors files with the same headers. `digests` holds the base's and the result's
    digests."""
    tensors = {}
    for before, after in zip(base, result, strict=True):
        old, new = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
        for span in _spans(after):
            if np.array_equal(old[span.start : span.stop], new[span.start : span.stop]):
                continue
            sizes = [file.write(_compress(old[at:end] ^ new[at:end], span.width)) for at, end in span.parts()]
            tensors[span.name] = ChangedTensor(sizes=sizes, crc32=zlib.crc32(new[span.start : span.stop].data))
    header = hashlib.sha256(_headers(result)).hexdigest()
    index = DeltaIndex(base=digests[0], result=digests[1], header=header, tensors=tensors).model_dump_json().encode()
    file.write(index + len(index).to_bytes(8, "little") + MAGIC)


def apply_delta(weights: Sequence[Path], delta: Path, base: str, result: str) -> None:
    """Turn the safetensors files `weights` of version `base` into version `result`, in place; both are digests.

    The files must be in the same order as for `encode_delta`. Raises `WeightsError` if the delta is damaged or between
    other versions, or if the weights are not its base; the files may then belong to no version.
    """
    changes = np.memmap(delta, np.uint8, "r") if delta.stat().st_size else np.zeros(0, np.uint8)
    index, parts_end = _read_index(changes)
    if (index.base, index.result) != (base, result):
        raise _refused(f"it leads from {index.base[:12]} to {index.result[:12]}, not from {base[:12]} to {result[:12]}")
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("r+b")) for path in weights]
            mapped = [opened.enter_context(mmap.mmap(file.fileno(), 0)) for file in files]
            _apply(mapped, index, changes[:parts_end])
    except (ValueError, LookupError, TypeError, zstandard.ZstdError) as error:
        raise _refused(str(error)) from error


def _apply(files: Sequence[mmap.mmap], index: DeltaIndex, changes: ByteArray) -> None:
    """Apply the changes. Raises `ValueError` and other errors for a delta that does not fit or is damaged."""
    if hashlib.sha256(_headers(files)).hexdigest() != index.header:
        raise ValueError("the tensors of its base have other names, dtypes or shapes")
    spans = {span.name: (data, span) for data in files for span in _spans(data)}
    if sum(size for changed in index.tensors.values() for size in changed.sizes) != len(changes):
        raise ValueError("the sizes of its parts do not add up")
    at = 0
    for name, changed in index.tensors.items():
        if name not in spans:
            raise ValueError(f"its base has no tensor {name!r}")
        end = at + sum(changed.sizes)
        _apply_tensor(*spans[name], changed, changes[at:end])
        at = end


def _apply_tensor(data: mmap.mmap, span: Span, changed: ChangedTensor, parts: ByteArray) -> None:
    ranges, ends = list(span.parts()), np.cumsum(changed.sizes)
    if len(ranges) != len(ends):
        raise ValueError(f"tensor {span.name!r} has {len(ranges)} parts, not {len(ends)}")
    crc32 = 0
    for (start, stop), part in zip(ranges, np.split(parts, ends[:-1]), strict=True):
        difference = _decompress(part, stop - start, span.width)
        new = np.frombuffer(data, np.uint8, stop - start, start) ^ difference
        data[start:stop] = new.data
        crc32 = zlib.crc32(new.data, crc32)
    if crc32 != changed.crc32:
        raise ValueError(f"tensor {span.name!r} does not result in the published values")


def _compress(difference: ByteArray, width: int) -> bytes:
    sorted_bytes = np.ascontiguousarray(difference.reshape(-1, width).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(sorted_bytes.data)


def _decompress(part: ByteArray, size: int, width: int) -> ByteArray:
    if (claimed := zstandard.frame_content_size(part.data)) != size:
        raise ValueError(f"a part holds {claimed} bytes, not {size}")
    raw = zstandard.ZstdDecompressor().decompress(part.data, allow_extra_data=False)
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(width, -1).T).reshape(-1)


def _read_index(changes: ByteArray) -> tuple[DeltaIndex, int]:
    """Return the index, and where the parts end. Raises `WeightsError`."""
    tail = changes[-_TAIL_BYTES:].tobytes()
    length = int.from_bytes(tail[:8], "little")
    if tail[8:] != MAGIC or length > min(len(changes) - _TAIL_BYTES, MAX_HEADER_BYTES):
        raise _refused("it is truncated, or not a delta of this version of rollq")
    end = len(changes) - _TAIL_BYTES - length
    try:
        return DeltaIndex.model_validate_json(changes[end : end + length].tobytes()), end
    except ValidationError as error:
        raise _refused("its index cannot be read") from error


def _headers(files: Sequence[Bytes]) -> bytes:
    return b"".join(map(_header, files))


def _header(data: Bytes) -> bytes:
    """A safetensors file's header, with its length."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(len(data) - 8, MAX_HEADER_BYTES):
        raise ValueError("its base is not a safetensors file")
    return data[: 8 + length]


def _spans(data: Bytes) -> list[Span]:
    """The spans of a safetensors file's tensors. Raises `ValueError` and other errors for an incomplete file."""
    header = _header(data)
    tensors: dict[str, Any] = orjson.loads(header[8:])
    tensors.pop("__metadata__", None)
    return [_span(name, entry, len(header), len(data)) for name, entry in tensors.items()]


def _span(name: str, tensor: dict[str, Any], offset: int, size: int) -> Span:
    start, stop = (int(at) + offset for at in tensor["data_offsets"])
    width = _WIDTHS.get(tensor["dtype"], 1)
    if not offset <= start <= stop <= size or (stop - start) % width:
        raise ValueError(f"tensor {name!r} of its base lies outside the file")
    return Span(name, width, start, stop)


def _refused(why: str) -> WeightsError:
    return WeightsError(f"a delta of the weights is refused: {why}; publish a complete copy")
