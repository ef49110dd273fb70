"""Places for a trainer's weights and deltas: Redis, a folder that all workers share, or an object store."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from rollq.buffer.common.atomic_files import atomic_file, put_in_place
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.manifest import describe_folder, digest_of, published_files
from rollq.buffer.weights.object_store import REQUEST_BYTES, ObjectStore
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import (
    StoredWeights,
    check_redis_size,
    delta_uri,
    locate_weights,
    needed_uris,
    read_files,
    record_weights,
    store_delta,
    store_weights,
)
from rollq.consumer.settings import Transport
from rollq.consumer.weights.model_folders import PREFIX, unfinished_prefix

_DIGITS = 16
"""Number of a hash's hexadecimal digits in a folder's or delta's name."""


class Place(Protocol):
    """Stores weights under names derived from their content. The last `kept` versions stay, with the files that they
    need."""

    scratch: Path | None
    """The folder in which a model is written before it is stored; None: `TMPDIR`."""

    def check(self, size_bytes: int) -> None:
        """Raise `WeightsError` or `ConfigError` if a model of this size cannot be stored."""

    def put_model(self, folder: Path, manifest: bytes, probe: Probe | None) -> StoredWeights:
        """Store a model of `UnfinishedModels`; `manifest` is its encoded manifest."""

    def put_folder(self, folder: Path, probe: Probe | None) -> StoredWeights:
        """Store the weights of a folder, or announce them in place."""

    def delta_uri(self, sha256: str, size_bytes: int) -> str:
        """The URI that a delta will have."""

    def put_delta(self, uri: str, data: memoryview) -> None:
        """Store a delta, and remove files that are no longer needed."""


def make_place(
    buffer: TrainerBuffer, transport: Transport, where: Path | str | None, kept: int, scratch: Path | None
) -> Place:
    """The place for a transport. `where` is the folder for `path` and `nccl`, or the URL for `s3`. Raises
    `ConfigError`.

    With `s3`, models are written to the folder `scratch`, by default `TMPDIR`, before they are uploaded.
    """
    if transport == "redis":
        return RedisPlace(buffer, kept)
    if transport == "s3":
        return BucketPlace(buffer, ObjectStore(str(where)), kept, scratch)
    return FolderPlace(buffer, transport, None if where is None else Path(where), kept)


class RedisPlace:
    """Chunks in Redis. Raises `WeightsError` for weights that are too large."""

    def __init__(self, buffer: TrainerBuffer, kept: int) -> None:
        self.scratch: Path | None = None
        self._buffer = buffer
        self._kept = kept

    def check(self, size_bytes: int) -> None:
        """See `Place`."""
        check_redis_size(size_bytes)

    def put_model(self, folder: Path, manifest: bytes, probe: Probe | None) -> StoredWeights:
        """See `Place`."""
        return self.put_folder(folder, probe)

    def put_folder(self, folder: Path, probe: Probe | None) -> StoredWeights:
        """See `Place`."""
        return store_weights(self._buffer, read_files(folder), kept=self._kept, probe=probe)

    def delta_uri(self, sha256: str, size_bytes: int) -> str:
        """See `Place`."""
        return delta_uri(sha256, size_bytes)

    def put_delta(self, uri: str, data: memoryview) -> None:
        """See `Place`."""
        store_delta(self._buffer, uri, data)


class FolderPlace:
    """A folder that the trainer and all workers share. Folders of weights are announced in place."""

    def __init__(self, buffer: TrainerBuffer, transport: Transport, folder: Path | None, kept: int) -> None:
        self._buffer = buffer
        self._transport = transport
        self.scratch = self._folder = folder
        self._kept = kept

    def check(self, size_bytes: int) -> None:
        """See `Place`. Raises `ConfigError` without a folder to write to."""
        self._shared()

    def put_model(self, folder: Path, manifest: bytes, probe: Probe | None) -> StoredWeights:
        """See `Place`."""
        named = self._named(digest_of(manifest))
        if named.exists():
            named.touch()  # marks it as the newest
        else:
            put_in_place(folder, named)
        self._prune()
        return record_weights(self._buffer, manifest, named.absolute().as_uri(), kept=self._kept, probe=probe)

    def put_folder(self, folder: Path, probe: Probe | None) -> StoredWeights:
        """See `Place`. The folder must stay until newer weights are published."""
        return locate_weights(self._buffer, folder, kept=self._kept, probe=probe)

    def delta_uri(self, sha256: str, size_bytes: int) -> str:
        """See `Place`."""
        named = self._named(sha256)
        return named.with_name(f"{named.name}.delta").absolute().as_uri()  # a run's name may contain dots

    def put_delta(self, uri: str, data: memoryview) -> None:
        """See `Place`."""
        atomic_file(_path_of(uri), data)
        self._prune()

    def _named(self, sha256: str) -> Path:
        return self._shared() / f"{PREFIX}{self._buffer.run}-{sha256[:_DIGITS]}"

    def _shared(self) -> Path:
        if self._folder is None:
            raise ConfigError(
                f"transport {self._transport!r} needs weights_dir, a folder that the trainer and all workers share"
            )
        return self._folder

    def _prune(self) -> None:
        """Remove old folders and deltas of this run."""
        if self._folder is not None:
            needed = {_path_of(uri) for uri in needed_uris(self._buffer, self._kept) if uri.startswith("file:")}
            prefix = f"{PREFIX}{self._buffer.run}-" + "[0-9a-f]" * _DIGITS
            doomed = self._folder / unfinished_prefix(self._buffer, self._folder)
            keep_newest(self._folder, (prefix, f"{prefix}.delta"), self._kept, needed, doomed)


class BucketPlace:
    """Objects `<run>/<name>/<file>` and `<run>/<name>.delta` below the prefix of an S3-compatible store."""

    def __init__(self, buffer: TrainerBuffer, store: ObjectStore, kept: int, scratch: Path | None) -> None:
        self._buffer = buffer
        self._store = store
        self._kept = kept
        self.scratch = scratch

    def check(self, size_bytes: int) -> None:
        """See `Place`. A bucket takes any size."""

    def put_folder(self, folder: Path, probe: Probe | None) -> StoredWeights:
        """See `Place`."""
        return self.put_model(folder, describe_folder(folder).encode(), probe)

    def put_model(self, folder: Path, manifest: bytes, probe: Probe | None) -> StoredWeights:
        """See `Place`."""
        name = self._name(digest_of(manifest))
        for path in published_files(folder):
            self._store.upload(f"{name}/{path.name}", _file_pieces(path), path.stat().st_size)
        stored = record_weights(self._buffer, manifest, self._store.uri(name), kept=self._kept, probe=probe)
        self._prune()
        return stored

    def delta_uri(self, sha256: str, size_bytes: int) -> str:
        """See `Place`."""
        return self._store.uri(f"{self._name(sha256)}.delta")

    def put_delta(self, uri: str, data: memoryview) -> None:
        """See `Place`."""
        self._store.upload(uri.removeprefix(self._store.uri("")), _pieces(data), len(data))
        self._prune()

    def _name(self, sha256: str) -> str:
        return f"{self._buffer.run}/{sha256[:_DIGITS]}"

    def _prune(self) -> None:
        """Remove old objects of this run, folder by folder."""
        needed = needed_uris(self._buffer, self._kept)
        objects = self._store.names(self._buffer.run)
        folders = list(dict.fromkeys(_folder_of(name) for name in reversed(objects)))  # newest first
        stay = set(folders[: self._kept]) | {name for name in folders if self._store.uri(name) in needed}
        if old := [name for name in objects if _folder_of(name) not in stay]:
            self._store.remove(old)


def keep_newest(parent: Path, patterns: tuple[str, ...], count: int, needed: set[Path], doomed: Path) -> None:
    """Remove entries of `parent` that match the patterns, except the `count` last changed entries and the `needed`
    entries.

    Workers may read the live weights until others are published. A folder is first renamed to a name that begins like
    `doomed`, so a folder under its original name is complete, even after a kill.
    """
    stored = [path for pattern in patterns for path in parent.glob(pattern)]
    for old in sorted(stored, key=lambda path: path.stat().st_mtime_ns)[:-count]:
        if old.absolute() in needed:
            continue
        if old.is_dir():
            shutil.rmtree(old.rename(f"{doomed}{secrets.token_hex(4)}"))
        else:
            old.unlink()


def _folder_of(name: str) -> str:
    """The part of an object's name that the objects of one version share."""
    return "/".join(name.split("/")[:2])


def _path_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + REQUEST_BYTES] for start in range(0, len(data), REQUEST_BYTES))


def _file_pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(REQUEST_BYTES):
                yield piece
    except OSError as error:
        raise WeightsError(f"weights {str(path)!r} cannot be read: {error.strerror}") from error
