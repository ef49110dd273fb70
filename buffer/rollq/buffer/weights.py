"""Weights on their way from the trainer to the workers: a file both can see, or chunks in Redis. Bytes only, no torch.

Invariant: whoever loads weights has compared their sha256 with the digest that the trainer published. Weights in
Redis are named by that digest, so storing the same ones again changes nothing.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from rollq.buffer import functions
from rollq.buffer.connection import patiently
from rollq.buffer.core import BufferCore
from rollq.buffer.errors import WeightsError

WEIGHTS_FILE = "model.safetensors"
CHUNK_BYTES = 8 << 20
MAX_REDIS_BYTES = 64 << 20
KEPT_IN_REDIS = 3
"""How many of the last published weights stay in Redis, for workers that are slow to fetch them."""
_REDIS_URI = re.compile(r"redis:([0-9a-f]{64})/(\d+)")


class StoredWeights(NamedTuple):
    """Where weights are, and the sha256 of their bytes in hex."""

    uri: str
    digest: str


def locate_weights(folder: Path) -> StoredWeights:
    """The weights `folder`/model.safetensors as workers that share the file system find them.

    Raises `WeightsError` when the file is not there.
    """
    return StoredWeights(folder.absolute().as_uri(), _digest(_read_chunks(folder / WEIGHTS_FILE)))


def name_in_redis(data: bytes) -> StoredWeights:
    """What `store_weights` calls these bytes, for ranks that do not store them.

    Raises `WeightsError` for more than `MAX_REDIS_BYTES`.
    """
    check_redis_size(len(data))
    digest = hashlib.sha256(data).hexdigest()
    return StoredWeights(f"redis:{digest}/{len(range(0, len(data), CHUNK_BYTES))}", digest)


def store_weights(buffer: BufferCore, data: bytes) -> StoredWeights:
    """Put the bytes of a safetensors file into Redis, in chunks; the oldest beyond `KEPT_IN_REDIS` go.

    Raises `WeightsError` for more than `MAX_REDIS_BYTES`, `StoreLost`, `ServerError`.
    """
    stored = name_in_redis(data)
    starts = range(0, len(data), CHUNK_BYTES)
    for part, start in enumerate(starts):
        held = functions.call(
            buffer.client, buffer.patience, "store_weights", buffer.keys.info, buffer.incarnation, stored.digest,
            len(starts), part, data[start : start + CHUNK_BYTES],
        )  # fmt: skip
        for old in held[:-KEPT_IN_REDIS]:
            _drop(buffer, old.decode())
    return stored


def check_redis_size(size_bytes: int) -> None:
    """Raise `WeightsError` for weights that are too large for Redis."""
    if size_bytes > MAX_REDIS_BYTES:
        raise WeightsError(
            f"weights of {size_bytes / 2**20:.0f} MiB are too large for Redis (limit {MAX_REDIS_BYTES >> 20} MiB): "
            "set transport = 'path', with a folder that the trainer and all workers share"
        )


def load_weights(buffer: BufferCore, uri: str, digest: str, into: Path) -> Path:
    """Return a folder that holds the weights `uri` as model.safetensors, their sha256 compared with `digest`.

    A `file://` folder is returned as it is; weights in Redis are written to `into`, replacing what was there.
    Raises `WeightsError` when they are missing, truncated or others than announced, `ServerError`.
    """
    if in_redis := _REDIS_URI.fullmatch(uri):
        return _download(buffer, in_redis[1], int(in_redis[2]), digest, into)
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise WeightsError(f"weights {uri!r}: neither file:///path nor redis:<digest>/<chunks>")
    folder = Path(unquote(parts.path))
    _compare(uri, _digest(_read_chunks(folder / WEIGHTS_FILE)), digest)
    return folder


def _download(buffer: BufferCore, name: str, chunks: int, digest: str, into: Path) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    unfinished = into / f".{WEIGHTS_FILE}.{os.getpid()}"
    found = hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for part in range(chunks):
                chunk = _send(buffer, partial(buffer.client.get, buffer.keys.weights(name, part)))
                if chunk is None:
                    raise WeightsError(
                        f"weights {name[:12]}: chunk {part} of {chunks} is not in Redis (any more); "
                        f"the last {KEPT_IN_REDIS} versions are kept: fetch the live ones"
                    )
                found.update(chunk)
                file.write(chunk)
        _compare(f"redis:{name}/{chunks}", found.hexdigest(), digest)
        unfinished.replace(into / WEIGHTS_FILE)
    finally:
        unfinished.unlink(missing_ok=True)
    return into


def _drop(buffer: BufferCore, entry: str) -> None:
    """Forget weights: their chunks first, so that a crash leaves them listed."""
    digest, _, chunks = entry.partition("/")
    names = [buffer.keys.weights(digest, part) for part in range(int(chunks))]
    _send(buffer, partial(buffer.client.unlink, *names))
    _send(buffer, partial(buffer.client.lrem, buffer.keys.weights_held, 0, entry))


def _send(buffer: BufferCore, command: Callable[[], Any]) -> Any:
    """Run a command that is harmless to repeat."""
    return patiently(buffer.client, command, buffer.patience)


def _compare(uri: str, found: str, digest: str) -> None:
    if found != digest:
        raise WeightsError(f"weights {uri!r}: sha256 is {found[:12]}..., announced was {digest[:12]}...; publish again")


def _digest(chunks: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def _read_chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise WeightsError(f"weights {str(path)!r} cannot be read: {error.strerror}; publish them again") from error
