"""Weights on their way from the trainer to the workers: a folder both can see, or chunks in Redis. Bytes, no torch.

Invariant: `load_weights` has compared the weights with their manifest, and the manifest with the digest that the
trainer published. Weights are named by that digest, so storing the same ones again changes nothing.
"""

import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from rollq.buffer.core import BufferCore
from rollq.buffer.durable import atomic_folder
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import (
    Manifest,
    Verify,
    describe_bytes,
    describe_folder,
    digest_of,
    published_files,
    verify_folder,
)
from rollq.buffer.weights.probe import Probe

CHUNK_BYTES = 8 << 20
MAX_REDIS_BYTES = 64 << 20
PROBE_PART = 1_000_000
"""The number of the chunk that holds the probe, however many others there are."""
KEPT_VERSIONS = 3
"""How many of the last published weights stay, for workers that are slow to fetch them."""
KEPT_DOWNLOADS = 4
"""Folders that a worker keeps: engines may come back to an adapter that requests still use."""
TTL_S = 24 * 3600
"""How long weights in Redis outlive their trainer."""
_REDIS_URI = re.compile(r"redis:([0-9a-f]{64})/(\d+)")


class StoredWeights(NamedTuple):
    """Where weights are, and the sha256 of their manifest in hex."""

    uri: str
    digest: str


def read_files(folder: Path) -> dict[str, bytes]:
    """The weights of `folder`, file by file. Raises `WeightsError` when they are missing or too large for Redis."""
    try:
        paths = published_files(folder)
        check_redis_size(sum(path.stat().st_size for path in paths))
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise WeightsError(f"weights {error.filename!r} cannot be read: {error.strerror}") from error


def locate_weights(
    buffer: BufferCore, folder: Path, *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Announce the weights in `folder`, as workers that share the file system find them; their manifest goes to Redis,
    and so does their probe.

    Raises `WeightsError` when they are not whole.
    """
    encoded = describe_folder(folder).encode()
    _store(buffer, digest_of(encoded), [encoded], kept, probe)
    return StoredWeights(folder.absolute().as_uri(), digest_of(encoded))


def store_weights(
    buffer: BufferCore, files: Mapping[str, bytes], *, kept: int = KEPT_VERSIONS, probe: Probe | None = None
) -> StoredWeights:
    """Put weights, file by file, into Redis in chunks, with their probe; of all versions there the last `kept` stay.

    Raises `WeightsError` for more than `MAX_REDIS_BYTES` or files that are not weights, `StoreLost`, `ServerError`.
    """
    check_redis_size(sum(map(len, files.values())))
    manifest = describe_bytes(files)
    encoded = manifest.encode()
    chunks = [
        files[name][start : start + CHUNK_BYTES]
        for name in sorted(files)
        for start in range(0, len(files[name]), CHUNK_BYTES)
    ]
    _store(buffer, digest_of(encoded), [encoded, *chunks], kept, probe)
    return StoredWeights(f"redis:{digest_of(encoded)}/{1 + len(chunks)}", digest_of(encoded))


def check_redis_size(size_bytes: int) -> None:
    """Raise `WeightsError` for weights that are too large for Redis."""
    if size_bytes > MAX_REDIS_BYTES:
        raise WeightsError(
            f"weights of {size_bytes / 2**20:.0f} MiB are too large for Redis (limit {MAX_REDIS_BYTES >> 20} MiB): "
            "set transport = 'path', with a folder that the trainer and all workers share"
        )


def keep_weights(buffer: BufferCore) -> None:
    """Have what Redis holds of weights live for `TTL_S` from now. The trainer calls it as long as it lives."""
    for entry in buffer.send(partial(buffer.client.lrange, buffer.keys.weights_held, 0, -1)):
        for name in _chunk_names(buffer, entry.decode()):
            buffer.send(partial(buffer.client.expire, name, TTL_S))


def load_weights(buffer: BufferCore, uri: str, digest: str, into: Path, verify: Verify = Verify.FULL) -> Path:
    """Return a folder that holds the weights `uri`, compared with their manifest, whose sha256 is `digest`.

    A `file://` folder is returned as it is, compared as far as `verify` says; weights in Redis are written to a folder
    below `into`, whose oldest go. Raises `WeightsError` when they are missing or others than announced, `ServerError`.
    """
    in_redis = _REDIS_URI.fullmatch(uri)
    parts = urlsplit(uri)
    if not in_redis and (parts.scheme != "file" or parts.netloc not in ("", "localhost")):
        raise WeightsError(f"weights {uri!r}: neither file:///path nor redis:<digest>/<chunks>")
    if in_redis and in_redis[1] != digest:
        raise WeightsError(f"weights {uri!r}: announced was {digest[:12]}...; publish again")
    encoded = _chunk(buffer, digest, 0)
    if digest_of(encoded) != digest:
        raise WeightsError(f"weights {uri!r}: their manifest is not the one that was announced; publish again")
    manifest = Manifest.decode(encoded)
    if in_redis:
        return _download(buffer, digest, int(in_redis[2]), manifest, into)
    folder = Path(unquote(parts.path))
    verify_folder(folder, manifest, verify)
    return folder


def _download(buffer: BufferCore, digest: str, chunks: int, manifest: Manifest, into: Path) -> Path:
    folder = into / digest[:16]
    if folder.exists():
        return folder
    hidden = into / f".{digest[:16]}.{os.getpid()}"  # another worker may download the same weights
    with atomic_folder(folder, hidden=hidden, replace=False, durable=False) as unfinished:
        data = b"".join(_chunk(buffer, digest, part) for part in range(1, chunks))
        if len(data) != sum(facts.bytes for facts in manifest.files.values()):
            raise WeightsError(f"weights {digest[:12]}: Redis holds {len(data)} bytes of them; publish them again")
        start = 0
        for name in sorted(manifest.files):
            end = start + manifest.files[name].bytes
            (unfinished / name).write_bytes(data[start:end])
            start = end
        verify_folder(unfinished, manifest, Verify.FULL)
    for old in sorted(into.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)[:-KEPT_DOWNLOADS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def read_probe(buffer: BufferCore, digest: str) -> Probe | None:
    """The probe that was published with weights; None without one. Raises `WeightsError`, `ServerError`."""
    raw: bytes | None = buffer.send(partial(buffer.client.get, buffer.keys.weights(digest, PROBE_PART)))
    return None if raw is None else Probe.decode(raw)


def _store(buffer: BufferCore, digest: str, chunks: list[bytes], kept: int, probe: Probe | None) -> None:
    """Store the chunks of weights, and their probe.

    Weights that are not live yet, and may never be (their trainer was replaced), do not push out the live ones.
    """
    parts = dict(enumerate(chunks)) | ({} if probe is None else {PROBE_PART: probe.encode()})
    (live,) = buffer.send(partial(buffer.client.hmget, buffer.keys.model, "digest"))
    for part, chunk in parts.items():
        held = buffer.call(
            "store_weights", buffer.keys.info, buffer.incarnation, digest, len(chunks), part, TTL_S, chunk
        )
        for old in held[:-kept]:
            if old.partition(b"/")[0] != live:
                _drop(buffer, old.decode())


def _chunk(buffer: BufferCore, digest: str, part: int) -> bytes:
    chunk: bytes | None = buffer.send(partial(buffer.client.get, buffer.keys.weights(digest, part)))
    if chunk is None:
        raise WeightsError(
            f"weights {digest[:12]}: chunk {part} is not in Redis (any more); the last versions are kept, for "
            f"{TTL_S // 3600} h after their trainer ended: publish them again, or fetch the live ones"
        )
    return chunk


def _drop(buffer: BufferCore, entry: str) -> None:
    """Forget weights: their chunks first, so that a crash leaves them listed."""
    buffer.send(partial(buffer.client.unlink, *_chunk_names(buffer, entry)))
    buffer.send(partial(buffer.client.lrem, buffer.keys.weights_held, 0, entry))


def _chunk_names(buffer: BufferCore, entry: str) -> list[str]:
    digest, _, chunks = entry.partition("/")
    return [buffer.keys.weights(digest, part) for part in (*range(int(chunks)), PROBE_PART)]
