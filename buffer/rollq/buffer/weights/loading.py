"""Loads weights on a worker: finds them in a shared folder, or fetches them into a local folder, whole or as deltas.

Invariant: `load_weights` returns only weights that it has compared with their manifest, after comparing the manifest
with the digest that the trainer published, even after a faulty delta.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from urllib.parse import unquote, urlsplit

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.common.atomic_files import atomic_folder
from rollq.buffer.common.s3 import URL
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.chain import Chain, Link, is_chain
from rollq.buffer.weights.delta import apply_delta
from rollq.buffer.weights.manifest import Manifest, Verify, verify_folder, weight_files
from rollq.buffer.weights.object_store import ObjectStore
from rollq.buffer.weights.store import read_chain, read_chunks, read_manifest

log = logging.getLogger(__name__)

KEPT_DOWNLOADS = 4
"""The number of adapter folders that a worker keeps: engines may need one again while requests still use it."""
KEPT_MODELS = 2
"""The number of model folders, which may be large, that a worker keeps: the last two versions."""
_COPY_BYTES = 8 << 20
_FILE_URI = re.compile(r"file://(localhost)?/.*")
_URI = re.compile(rf"{_FILE_URI.pattern}|redis:[0-9a-f]{{64}}/\d+|s3://.+|delta:[0-9a-f]{{64}}")
_DELTA_FILE = ".delta"
_UNREADABLE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def load_weights(buffer: BufferCore, uri: str, digest: str, into: Path, verify: Verify = Verify.FULL) -> Path:
    """Return a folder with the weights at `uri`, compared with their manifest, whose sha256 is `digest`.

    A `file://` folder is returned unchanged, compared to the extent that `verify` sets; other weights are written to a
    folder below `into`, where the oldest folders are removed. Raises `ServerError`, and `WeightsError` if the weights
    are missing or not the announced weights.
    """
    if _URI.fullmatch(uri) is None:
        raise WeightsError(f"weights {uri!r}: neither file:///path, redis:<digest>/<n>, s3://bucket/... nor delta:<id>")
    manifest = Manifest.decode(read_manifest(buffer, uri, digest))
    if uri.startswith("file:"):
        shared = _local_path(uri)
        verify_folder(shared, manifest, verify)
        return shared
    folder = _folder_of(digest, into)
    if not folder.exists():
        chain = read_chain(buffer, uri, digest) if is_chain(uri) else Chain(complete=uri, digest=digest)
        _Rebuild(buffer, chain, manifest, into).run()
        most = KEPT_DOWNLOADS if manifest.kind == "lora" else KEPT_MODELS
        for old in sorted(into.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)[:-most]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


class _Rebuild:
    """Makes a complete weights folder below `into`, from a version that is already there or from the complete copy."""

    def __init__(self, buffer: BufferCore, chain: Chain, manifest: Manifest, into: Path) -> None:
        self._buffer = buffer
        self._chain = chain
        self._manifest = manifest
        self._into = into
        self._moved_bytes = 0

    def run(self) -> None:
        """Make the folder; if a base in `into` has changed, remove it and use the complete copy. Raises
        `WeightsError`."""
        start = self._newest_here()
        try:
            self._build(start)
        except _BaseChanged as error:
            log.warning("%s; starting again from the complete copy", error)
            self._build(None)

    def _newest_here(self) -> int | None:
        """The chain's last version that is in `into`, as an index into `Chain.versions`."""
        here = [_folder_of(version, self._into).exists() for version in self._chain.versions]
        return max((index for index, exists in enumerate(here) if exists), default=None)

    def _build(self, start: int | None) -> None:
        started_s, digest = monotonic(), self._chain.versions[-1]
        folder = _folder_of(digest, self._into)
        hidden = self._into / f".{folder.name}.{os.getpid()}"  # another worker may fetch the same weights
        links = self._chain.deltas[start or 0 :]
        with atomic_folder(folder, hidden=hidden, replace=False, durable=False) as unfinished:
            for number, link in enumerate(links):
                self._fetch_delta(link, unfinished / f"{_DELTA_FILE}-{number}")
            if start is None:
                self._fetch_complete(unfinished)
                self._apply(links, unfinished)
            else:
                self._continue(_folder_of(self._chain.versions[start], self._into), links, unfinished)
        log.info(
            "weights %s: fetched %d bytes (%s%d deltas) in %.1f s",
            digest[:12],
            self._moved_bytes,
            "a complete copy and " if start is None else "",
            len(links),
            monotonic() - started_s,
        )

    def _fetch_complete(self, folder: Path) -> None:
        uri, files = self._chain.complete, self._manifest.files
        self._moved_bytes += sum(facts.bytes for facts in files.values())
        if uri.startswith("file:"):
            self._copy(_local_path(uri), folder)
        elif uri.startswith("s3:"):
            store = _store_at(uri)
            for name, facts in files.items():
                store.download(name, folder / name, facts.bytes)
        else:
            self._write_files(b"".join(read_chunks(self._buffer, uri)), folder)

    def _write_files(self, data: bytes, folder: Path) -> None:
        """Write the files from their joined bytes, in the order of file names."""
        if len(data) != sum(facts.bytes for facts in self._manifest.files.values()):
            digest = self._chain.digest[:12]
            raise WeightsError(f"weights {digest}: Redis holds {len(data)} bytes of them; publish them again")
        start = 0
        for name, facts in sorted(self._manifest.files.items()):
            (folder / name).write_bytes(data[start : start + facts.bytes])
            start += facts.bytes

    def _continue(self, base: Path, links: Sequence[Link], folder: Path) -> None:
        try:
            self._copy(base, folder)
            self._apply(links, folder)
        except WeightsError as error:
            shutil.rmtree(base, ignore_errors=True)
            raise _BaseChanged(f"weights {str(base)!r} have changed since they were loaded: {error}") from error

    def _copy(self, base: Path, folder: Path) -> None:
        for name in self._manifest.files:
            try:
                shutil.copyfile(base / name, folder / name)
            except _UNREADABLE as error:
                problem = f"{name!r} cannot be read ({error.strerror})"
                raise WeightsError(f"weights {str(base)!r}: {problem}; publish a complete copy") from error

    def _apply(self, links: Sequence[Link], folder: Path) -> None:
        """Apply the fetched deltas, and compare the result with the manifest."""
        for number, link in enumerate(links):
            delta = folder / f"{_DELTA_FILE}-{number}"
            apply_delta(weight_files(folder), delta, link.base, link.result)
            delta.unlink()
        verify_folder(folder, self._manifest, Verify.FULL)

    def _fetch_delta(self, link: Link, path: Path) -> None:
        """Write a delta to a file. Raises `WeightsError` unless it has the published bytes."""
        if link.uri.startswith("s3:"):
            where, _, name = link.uri.rpartition("/")
            _store_at(where).download(name, path, link.bytes)
        else:
            _write(self._read(link.uri), path, link.bytes)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != link.sha256:
            raise WeightsError(f"the delta {link.uri!r} is not the one that was published; publish a complete copy")
        self._moved_bytes += link.bytes

    def _read(self, uri: str) -> Iterable[bytes]:
        return _read_file(_local_path(uri)) if uri.startswith("file:") else read_chunks(self._buffer, uri)


class _BaseChanged(WeightsError):
    """A version that was rebuilt here has changed since then."""


def _write(pieces: Iterable[bytes], path: Path, most: int) -> None:
    """Write pieces to a file until it has more than `most` bytes."""
    size = 0
    with path.open("wb") as file:
        for piece in pieces:
            size += file.write(piece)
            if size > most:
                break


def _read_file(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(_COPY_BYTES):
                yield piece
    except _UNREADABLE as error:
        raise WeightsError(
            f"the delta {str(path)!r} cannot be read ({error.strerror}); publish a complete copy"
        ) from error


def _local_path(uri: str) -> Path:
    if _FILE_URI.fullmatch(uri) is None or "\0" in (path := unquote(urlsplit(uri).path)):
        raise WeightsError(f"weights {uri!r}: not file:///path; publish them again")
    return Path(path)


def _store_at(url: str) -> ObjectStore:
    if URL.fullmatch(url) is None:
        raise WeightsError(f"weights {url!r}: not below s3://bucket/prefix; publish them again")
    return ObjectStore(url)


def _folder_of(digest: str, into: Path) -> Path:
    return into / digest[:16]
