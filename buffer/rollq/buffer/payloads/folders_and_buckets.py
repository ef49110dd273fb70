"""Objects in a folder, as plain files, or in a bucket. `ObjectPayloads` keeps payloads in these.

Both raise `FileNotFoundError` for a missing object, and errors that `explain` interprets.
"""

import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from rollq.buffer.common.atomic_files import fsync_path
from rollq.buffer.common.s3 import open_bucket
from rollq.buffer.errors import ConfigError, ServerRefused, ServerUnavailable
from rollq.buffer.payloads.background_sync import BackgroundSync
from rollq.buffer.store.redis_errors import Trouble
from rollq.buffer.wire.joined_frame import Pieces

FILES_PER_PAGE = 1000
UNFINISHED = "."
"""Prefix of files that are being written."""
ABANDONED_S = 3600.0
"""A file counts as abandoned when nothing was written to it for this number of seconds."""
NO_RIGHT = Trouble(ServerRefused, "give this role the right to read, write, list and delete there", passes=False)
AWAY = Trouble(ServerUnavailable, "check that it answers and has room", answered=False)
NO_KEY = Trouble(
    ServerUnavailable,
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; without them, this machine's metadata service is asked",
    answered=False,
)
METADATA_PATHS = ("/latest/api/token", "/latest/meta-data/")
"""In the URL of a request to the metadata service, which has the keys of a machine of AWS."""


Fsync = Literal["no", "always", "everysec"]
"""When a file is on disk: when the operating system chooses, when `put` returns, or at most a second later. A server
uses the same names for its append-only file."""


class NotMounted(OSError):
    """The folder exists, but the run's files in it do not."""


class Objects(Protocol):
    """Named values; names have slashes. `failure` is the error that a store raises when it may be unavailable."""

    failure: type[Exception]

    def put(self, name: str, value: bytes | Pieces) -> None:
        """Store a value; it appears complete or not at all."""

    def get(self, name: str) -> bytes | memoryview:
        """Read a value."""

    def open(self, name: str) -> BinaryIO:
        """A value as a file."""

    def size_bytes(self, name: str) -> int:
        """A value's size."""

    def remove(self, name: str) -> None:
        """Remove a value."""

    def pages(self, folder: str, *, tidy: bool = True) -> Iterator[list[str]]:
        """Yield the names in `folder/`, in pages, without that prefix; with `tidy`, remove abandoned files."""

    def remove_folder(self, folder: str) -> None:
        """Remove all values whose names begin with `folder/`."""

    def check_mounted(self, marker: str) -> None:
        """Raise `failure` if the store is unavailable but looks empty; `marker` names a value that always exists."""

    def explain(self, error: Exception) -> Trouble | None:
        """A failure's meaning; None for a missing object."""

    def close(self) -> None:
        """End all background work."""


class Folder:
    """`Objects` in a file system's folder."""

    failure: type[Exception] = OSError

    def __init__(self, path: str, setting: str = "payloads.url", *, fsync: Fsync = "no") -> None:
        """Raises `ConfigError`, naming the `setting`, unless `path` is the absolute path of an existing folder."""
        if not Path(path).is_absolute():
            raise ConfigError(f"{setting} = {path!r}: is neither s3://bucket/prefix nor the absolute path of a folder")
        if not Path(path).is_dir():
            raise ConfigError(f"{setting} = {path!r}: there is no such folder on this machine; mount it, or create it")
        self._path = Path(path)
        self._syncs_at_once = fsync == "always"
        self._sync = BackgroundSync(self._path) if fsync == "everysec" else None
        if self._sync:  # for a folder that is not closed, when it is collected or the process ends
            weakref.finalize(self, self._sync.close)
        self._on_disk = set[Path]()  # folders below it whose names are on disk

    def put(self, name: str, value: bytes | Pieces) -> None:
        """Write a file under a temporary name beside its path, then rename it."""
        path = os.fspath(self._at(name))
        folder, _, leaf = path.rpartition("/")
        unfinished = f"{folder}/{UNFINISHED}{leaf}.{secrets.token_hex(4)}"
        try:
            if self._syncs_at_once:
                self._make(Path(folder))
            try:
                _write(unfinished, value)
            except FileNotFoundError:  # the first file of its folder
                self._make(Path(folder))
                _write(unfinished, value)
            if self._syncs_at_once:
                fsync_path(Path(unfinished))
            os.replace(unfinished, path)
            if self._syncs_at_once:
                fsync_path(Path(folder))
        except OSError:  # the next try uses a new name, and a full disk has no room for both
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        if self._sync:
            self._sync.add(path)

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self._syncs_at_once and folder not in self._on_disk:
            inside = folder.relative_to(self._path).parts
            for parent in list(folder.parents)[: len(inside)]:
                fsync_path(parent)
            self._on_disk.add(folder)

    def close(self) -> None:
        """Sync the files that are not yet on disk."""
        if self._sync:
            self._sync.close()

    def get(self, name: str) -> bytes:
        """Read a file."""
        return self._at(name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        """Open a file to read it."""
        return self._at(name).open("rb")

    def size_bytes(self, name: str) -> int:
        """A file's size."""
        return self._at(name).stat().st_size

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._at(name).unlink()

    def pages(self, folder: str, *, tidy: bool = True) -> Iterator[list[str]]:
        """Yield the names of all files; with `tidy`, remove abandoned files."""
        root = self._at(folder) if folder else self._path
        files = (Path(at, name) for at, _, names in os.walk(root) for name in names)
        while page := list(islice(files, FILES_PER_PAGE)):
            for path in page:
                if tidy and path.name.startswith(UNFINISHED):
                    _remove_abandoned(path)
            yield [str(path.relative_to(root)) for path in page if not path.name.startswith(UNFINISHED)]

    def remove_folder(self, folder: str) -> None:
        """Remove the folder, and its parent if the parent is then empty."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._at(folder))
        with suppress(OSError):
            self._at(folder).parent.rmdir()

    def check_mounted(self, marker: str) -> None:
        """Raise `NotMounted` without the marker: the file system is not mounted where the folder is."""
        try:
            self._at(marker).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise NotMounted("it has lost all files of this run; perhaps its file system is not mounted") from None

    def _at(self, name: str) -> Path:
        """The path for a name, which may come from Redis. Raises `ServerRefused` for a name that leads elsewhere."""
        if not set(name.split("/")).isdisjoint({"", ".", ".."}) or "\0" in name:
            raise ServerRefused(f"{name!r:.200} is not the name of a file below {str(self._path)!r}")
        return self._path / name

    def explain(self, error: Exception) -> Trouble | None:
        """An `OSError`'s meaning."""
        if isinstance(error, FileNotFoundError):
            return None
        return NO_RIGHT if isinstance(error, PermissionError) else AWAY


class Bucket:
    """`Objects` in a bucket of an S3-compatible store. Needs `rollq[s3]`."""

    def __init__(self, url: str, what: str = "payloads") -> None:
        """Raises `ConfigError` for another kind of URL, for a wrong endpoint, and without obstore; messages say `what`
        the bucket holds."""
        self._store = open_bucket(url, {"timeout": "12h", "read_timeout": "20s"}, what=what, retries=0)
        from obstore.exceptions import BaseError

        self.failure: type[Exception] = BaseError

    def put(self, name: str, value: bytes | Pieces) -> None:
        """Store an object."""
        import obstore

        obstore.put(self._store, name, value if isinstance(value, bytes) else iter(value.parts))

    def get(self, name: str) -> memoryview:
        """Read an object."""
        import obstore

        return memoryview(obstore.get(self._store, name).bytes())

    def open(self, name: str) -> BinaryIO:
        """Return an object as an in-memory file."""
        return BytesIO(self.get(name))

    def size_bytes(self, name: str) -> int:
        """An object's size."""
        import obstore

        return obstore.head(self._store, name)["size"]

    def remove(self, name: str) -> None:
        """Remove an object."""
        import obstore

        obstore.delete(self._store, name)

    def pages(self, folder: str, *, tidy: bool = True) -> Iterator[list[str]]:
        """Yield the names of all objects. No object is ever unfinished."""
        import obstore

        for page in obstore.list(self._store, folder, chunk_size=FILES_PER_PAGE):
            yield [entry["path"].removeprefix(f"{folder}/") for entry in page]

    def remove_folder(self, folder: str) -> None:
        """Remove the objects."""
        import obstore

        for page in obstore.list(self._store, folder, chunk_size=FILES_PER_PAGE):
            obstore.delete(self._store, [entry["path"] for entry in page])

    def check_mounted(self, marker: str) -> None:
        """Do nothing: a bucket that does not answer raises an error."""

    def close(self) -> None:
        """Do nothing: an object is stored when `put` returns."""

    def explain(self, error: Exception) -> Trouble | None:
        """An obstore error's meaning. A missing object raises a different error."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return NO_RIGHT
        return NO_KEY if any(path in str(error) for path in METADATA_PATHS) else AWAY


def open_objects(url: str, *, fsync: Fsync = "no") -> Objects:
    """Open the objects at `s3://bucket/prefix`, or in a folder. Raises `ConfigError`."""
    return Bucket(url) if url.startswith("s3:") else Folder(url, fsync=fsync)


def _write(path: str, value: bytes | Pieces) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in [value] if isinstance(value, bytes) else value.parts:
            written = file.write(part)
            while written < len(part):
                written += file.write(part[written:])


def _remove_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime > ABANDONED_S:
            path.unlink()
