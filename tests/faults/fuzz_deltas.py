"""Hostile deltas of weights: of another base, out of order, truncated, with changed bits, parts or index."""

import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import zstandard
from safetensors.numpy import save

from faults.mutations import mutate_bytes, mutate_json
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.delta import MAGIC, apply_delta, encode_delta
from rollq.buffer.weights.manifest import WEIGHTS_FILE, describe_bytes, digest_of

VERSIONS = 4
SIZES = (700, 64, 3)


class Version(NamedTuple):
    """A version of a small model: its file, its digest, and the delta from the version before."""

    data: bytes
    digest: str
    delta: bytes


class HostileDelta(NamedTuple):
    """A delta that a worker is given for the step from one version to another."""

    base: Version
    result: Version
    delta: bytes


@cache
def versions(seed: int = 0) -> list[Version]:
    """Versions that differ in a few values each; in the last step, one tensor stays as it was."""
    rng = np.random.default_rng(seed)
    tensors = {f"t{size}": rng.standard_normal(size).astype(np.float32) for size in SIZES}
    found: list[Version] = []
    for number in range(VERSIONS):
        for size in SIZES[: 2 if number == VERSIONS - 1 else 3]:
            tensors[f"t{size}"] = tensors[f"t{size}"] + (rng.random(size) < 0.2).astype(np.float32)
        data = save(tensors)
        digest = _digest(data)
        delta = _delta(found[-1].data, data, (found[-1].digest, digest)) if found else b""
        found.append(Version(data, digest, delta))
    return found


def hostile_delta(rng: random.Random) -> HostileDelta:
    """A delta that is wrong in one of the ways above, for a step of the model."""
    number = rng.randrange(1, VERSIONS)
    base, result = versions()[number - 1 : number + 1]
    kind: Callable[[random.Random, Version, Version], HostileDelta] = rng.choice(
        [_wrong_base, _wrong_order, _forged_base, _truncated, _flipped, _changed, _swapped, _other_index, _bomb]
    )
    return kind(rng, base, result)


def refuse_delta(given: HostileDelta, folder: Path) -> None:
    """Apply a delta as a worker does, without comparing its SHA-256 first.

    Raises `WeightsError` when it is refused, and `AssertionError` when other weights than the result come out.
    """
    weights, delta = folder / WEIGHTS_FILE, folder / "delta"
    for path, data in ((weights, given.base.data), (delta, given.delta)):
        path.unlink(missing_ok=True)  # writing over a file waits for the disk
        path.write_bytes(data)
    apply_delta([weights], delta, given.base.digest, given.result.digest)
    if _digest(weights.read_bytes()) != given.result.digest:
        raise WeightsError("other weights than announced")
    assert weights.read_bytes() == given.result.data, "other weights have the digest that was announced"


def _digest(data: bytes) -> str:
    return digest_of(describe_bytes({WEIGHTS_FILE: data}).encode())


def _delta(base: bytes, result: bytes, digests: tuple[str, str]) -> bytes:
    file = io.BytesIO()
    encode_delta([base], [result], digests, file)
    return file.getvalue()


def _parts(delta: bytes) -> tuple[bytes, dict[str, Any]]:
    """The parts of a delta, and its index."""
    length = int.from_bytes(delta[-16:-8], "little")
    end = len(delta) - 16 - length
    return delta[:end], orjson.loads(delta[end : end + length])


def _with_index(parts: bytes, index: bytes) -> bytes:
    return parts + index + len(index).to_bytes(8, "little") + MAGIC


def _wrong_base(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    """The worker has another version, or another model."""
    other = rng.choice([one for one in versions() if one.digest != base.digest] + versions(1))
    return HostileDelta(Version(other.data, base.digest, b""), result, result.delta)


def _wrong_order(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    """The delta of another step."""
    return HostileDelta(base, result, rng.choice([one.delta for one in versions() if one.delta != result.delta]))


def _forged_base(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    """The delta of another step, with the digests of this one in its index."""
    parts, index = _parts(rng.choice([one.delta for one in versions()[1:] if one.delta != result.delta]))
    return HostileDelta(
        base, result, _with_index(parts, orjson.dumps({**index, "base": base.digest, "result": result.digest}))
    )


def _truncated(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    return HostileDelta(base, result, result.delta[: rng.randrange(len(result.delta))])


def _flipped(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    raw = bytearray(result.delta)
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return HostileDelta(base, result, bytes(raw))


def _changed(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    return HostileDelta(base, result, mutate_bytes(rng, result.delta))


def _swapped(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    """Two pieces of the parts change places."""
    parts, index = _parts(result.delta)
    first, second, third = sorted(rng.randrange(1, len(parts)) for _ in range(3))
    moved = parts[:first] + parts[second:third] + parts[first:second] + parts[third:]
    return HostileDelta(base, result, _with_index(moved, orjson.dumps(index)))


def _other_index(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    parts, index = _parts(result.delta)
    return HostileDelta(base, result, _with_index(parts, json.dumps(mutate_json(rng, index)).encode()))


def _bomb(rng: random.Random, base: Version, result: Version) -> HostileDelta:
    """The first part holds more than the tensor, up to 64 MiB, and says so or not."""
    parts, index = _parts(result.delta)
    name, tensor = next(iter(index["tensors"].items()))
    bomb = _zeros(rng.choice([1, 1 << 16, 1 << 26]), rng.random() < 0.5)
    tensor["sizes"] = [len(bomb)]
    return HostileDelta(base, result, _with_index(bomb + parts, orjson.dumps({**index, "tensors": {name: tensor}})))


@cache
def _zeros(size: int, says_its_size: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=says_its_size).compress(bytes(size))
