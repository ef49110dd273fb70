"""Keeps weights data in Redis: every version's manifest, probe and chain, and chunks of small weights. No torch. The
manifest's digest names the weights, so storing the same weights again changes nothing.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.chain import Chain, is_chain
from rollq.buffer.weights.manifest import describe_bytes, describe_folder, digest_of, published_files
from rollq.buffer.weights.probe import Probe

CHUNK_BYTES = 8 << 20
MAX_REDIS_BYTES = 64 << 20
PROBE_PART, CHAIN_PART = 1_000_000, 1_000_001
"""The numbers of the chunks that hold the probe, and the chain of a version published as a delta."""
KEPT_VERSIONS = 3
"""How many of the last published versions stay, for workers that are slow to fetch weights."""
TTL_S = 24 * 3600
"""How long weights in Redis outlive their trainer, in seconds."""
_DELTA = "delta-"
_REDIS_URI = re.compile(r"redis:((?:delta-)?[0-9a-f]{64})/(\d+)")


class StoredWeights(NamedTuple):
    """The URI of weights, and their manifest's SHA-256 in hex."""

    uri: str
    digest: str


def read_files(folder: Path) -> dict[str, bytes]:
    """The weights in `folder`, file by file. Raises `WeightsError` if they are missing or too large for Redis."""
    try:
        paths = published_files(folder)
        check_redis_size(sum(path.stat().st_size for path in paths))
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise WeightsError(f"weights {error.filename!r} cannot be read: {error.strerror}") from error


def locate_weights(
    buffer: BufferCore, folder: Path, *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Announce the weights in `folder` to workers that share the file system; see `record_weights`. Raises
    `WeightsError` if the weights are incomplete.
    """
    manifest = describe_folder(folder).encode()
    return record_weights(buffer, manifest, folder.absolute().as_uri(), kept=kept, probe=probe)


def record_weights(
    buffer: BufferCore, manifest: bytes, uri: str, *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Put the encoded manifest of weights stored elsewhere into Redis, with their probe."""
    _store(buffer, manifest, kept, probe)
    return StoredWeights(uri, digest_of(manifest))


def record_chain(
    buffer: BufferCore, manifest: bytes, chain: Chain, *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Put the encoded manifest of weights into Redis, with their probe and the chain that leads to them.

    Call this before storing their delta, since data that a chain names is not removed. Live weights that another chain
    leads to keep that chain and its URI, since workers may not have these weights yet.
    """
    live, digest = buffer.live_model(), digest_of(manifest)
    if live is not None and live.digest == digest and is_chain(live.uri):
        _store(buffer, manifest, kept, probe)
        return StoredWeights(live.uri, digest)
    _store(buffer, manifest, kept, probe, chain)
    return StoredWeights(chain.uri, digest)


def store_weights(
    buffer: BufferCore, files: Mapping[str, bytes], *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Put weights, file by file, into Redis in chunks, with their probe; the last `kept` versions stay.

    Raises `WeightsError` for more than `MAX_REDIS_BYTES` or files that are not weights, `StoreLost`, `ServerError`.
    """
    check_redis_size(sum(map(len, files.values())))
    manifest = describe_bytes(files).encode()
    chunks = [chunk for name in sorted(files) for chunk in _chunks(files[name])]
    _store(buffer, manifest, kept, probe, data=chunks)
    return StoredWeights(f"redis:{digest_of(manifest)}/{1 + len(chunks)}", digest_of(manifest))


def delta_uri(sha256: str, size_bytes: int) -> str:
    """The URI for `store_delta` to store a delta under. Raises `WeightsError` for a delta too large for Redis."""
    check_redis_size(size_bytes)
    return f"redis:{_DELTA}{sha256}/{-(-size_bytes // CHUNK_BYTES)}"


def store_delta(buffer: BufferCore, uri: str, data: memoryview) -> None:
    """Put a delta into Redis, in chunks. Raises `StoreLost`, `ServerError`."""
    name, _, count = uri.removeprefix("redis:").partition("/")
    for part, chunk in enumerate(_chunks(data)):
        _put(buffer, name, int(count), part, chunk)


def read_chunks(buffer: BufferCore, uri: str) -> Iterable[bytes]:
    """Yield the bytes of weights or a delta from Redis. Raises `ServerError`, and `WeightsError` if they are gone."""
    if (matched := _REDIS_URI.fullmatch(uri)) is None:
        raise WeightsError(f"weights {uri!r}: not redis:<digest>/<chunks>")
    first = 0 if matched[1].startswith(_DELTA) else 1  # the first chunk of weights is their manifest
    return (_chunk(buffer, matched[1], part) for part in range(first, int(matched[2])))


def _chunks(data: bytes | memoryview) -> list[bytes]:
    return [bytes(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]


def check_redis_size(size_bytes: int) -> None:
    """Raise `WeightsError` for weights too large for Redis."""
    if size_bytes > MAX_REDIS_BYTES:
        raise WeightsError(
            f"weights of {size_bytes / 2**20:.0f} MiB are too large for Redis (limit {MAX_REDIS_BYTES >> 20} MiB): "
            "set transport = 'path', with a folder that the trainer and all workers share, or transport = 's3'"
        )


def keep_weights(buffer: BufferCore) -> None:
    """Keep weights in Redis for `TTL_S` from now. The trainer calls this for as long as it runs."""
    for entry in buffer.send("LRANGE", buffer.keys.weights_held, 0, -1):
        for name in _chunk_names(buffer, entry.decode()):
            buffer.send("EXPIRE", name, TTL_S)


def read_manifest(buffer: BufferCore, uri: str, digest: str) -> bytes:
    """The encoded manifest of published weights. Raises `ServerError`, and `WeightsError` if it is gone or replaced."""
    matched = _REDIS_URI.fullmatch(uri)
    if matched and matched[1] != digest:
        raise WeightsError(f"weights {uri!r}: the announced digest is {digest[:12]}...; publish again")
    encoded = _chunk(buffer, digest, 0)
    if digest_of(encoded) != digest:
        raise WeightsError(f"weights {uri!r}: their manifest is not the one that was announced; publish again")
    return encoded


def read_chain(buffer: BufferCore, uri: str, digest: str) -> Chain:
    """The chain that leads to weights published as a delta. Raises `WeightsError` if it is gone or replaced."""
    chain = Chain.decode(_chunk(buffer, digest, CHAIN_PART))
    if chain.uri != uri:
        raise WeightsError(f"weights {uri!r}: their chain of deltas was replaced; fetch the live weights")
    return chain


def read_probe(buffer: BufferCore, digest: str) -> Probe | None:
    """The probe that was published with weights; None without one. Raises `WeightsError`, `ServerError`."""
    raw: bytes | None = buffer.send("GET", buffer.keys.weights(digest, PROBE_PART))
    return None if raw is None else Probe.decode(raw)


def needed_uris(buffer: BufferCore, kept: int) -> set[str]:
    """The live weights' URI, and all URIs in the chains of the last `kept` versions and of the live version."""
    held = [entry.decode() for entry in buffer.send("LRANGE", buffer.keys.weights_held, 0, -1)]
    live = buffer.live_model()
    digests, uris = list(map(_name, _versions(held)[-kept:])), set[str]()
    if live is not None:
        digests.append(live.digest)
        uris.add(live.uri)
    for digest in digests:
        if raw := buffer.send("GET", buffer.keys.weights(digest, CHAIN_PART)):
            uris.update(Chain.decode(raw).uris)
    return uris


def _store(
    buffer: BufferCore,
    manifest: bytes,
    kept: int,
    probe: Probe | None,
    chain: Chain | None = None,
    data: Iterable[bytes] = (),
) -> None:
    """Store weights by their manifest's digest, and drop older weights.

    Weights that are not live yet, and may never be (their trainer was replaced), do not displace the live weights.
    """
    chunks = list(data)
    parts = {0: manifest}
    if probe is not None:
        parts[PROBE_PART] = probe.encode()
    if chain is not None:
        parts[CHAIN_PART] = chain.encode()
    for part, chunk in parts.items():
        held = _put(buffer, digest_of(manifest), 1 + len(chunks), part, chunk)
    _prune(buffer, held, kept)
    for part, chunk in enumerate(chunks, 1):
        _put(buffer, digest_of(manifest), 1 + len(chunks), part, chunk)


def _put(buffer: BufferCore, name: str, count: int, part: int, chunk: bytes) -> list[str]:
    """Store one of `count` chunks; returns the weights in Redis, as "name/count", oldest first."""
    held = buffer.call("store_weights", buffer.keys.info, buffer.incarnation, name, count, part, TTL_S, chunk)
    return [entry.decode() for entry in held]


def _prune(buffer: BufferCore, held: list[str], kept: int) -> None:
    """Drop all but the last `kept` versions, the live version, and the links of their chains."""
    live = buffer.live_model()
    versions = _versions(held)
    stay = {*versions[-kept:], *(entry for entry in versions if live and _name(entry) == live.digest)}
    stay |= {uri.removeprefix("redis:") for uri in needed_uris(buffer, kept)}
    for old in [entry for entry in held if entry not in stay]:
        _drop(buffer, old, held)


def _versions(held: list[str]) -> list[str]:
    return [entry for entry in held if not entry.startswith(_DELTA)]


def _name(entry: str) -> str:
    return entry.partition("/")[0]


def _chunk(buffer: BufferCore, digest: str, part: int) -> bytes:
    chunk: bytes | None = buffer.send("GET", buffer.keys.weights(digest, part))
    if chunk is None:
        raise WeightsError(
            f"weights {digest[:12]}: chunk {part} is not, or no longer, in Redis; the last versions are kept, for "
            f"{TTL_S // 3600} h after their trainer ended: publish them again, or fetch the live ones"
        )
    return chunk


def _drop(buffer: BufferCore, entry: str, held: list[str]) -> None:
    """Forget weights or a delta: the chunks first, so that a crash leaves them listed.

    The same weights may be held twice, complete and as the result of a delta, and share their manifest.
    """
    others = [other for other in held if other != entry and _name(other) == _name(entry)]
    names = set(_chunk_names(buffer, entry)).difference(*(_chunk_names(buffer, other) for other in others))
    if names:
        buffer.send("UNLINK", *names)
    buffer.send("LREM", buffer.keys.weights_held, 0, entry)
    held.remove(entry)


def _chunk_names(buffer: BufferCore, entry: str) -> list[str]:
    name, _, chunks = entry.partition("/")
    return [buffer.keys.weights(name, part) for part in (*range(int(chunks)), PROBE_PART, CHAIN_PART)]
