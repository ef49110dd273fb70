"""Payloads in a folder that all roles share, or in an S3-compatible object store. Needs `rollq[s3]` for both.

An object is named `<run>/<incarnation>/<task>/<group>/<leaf>`. Beside them is a marker, by which a role sees that the
folder or the bucket is the one in which the run began.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollq.buffer.errors import ConfigError, ServerRefused, ServerUnavailable
from rollq.buffer.payloads.store import PayloadName, T
from rollq.buffer.s3 import open_bucket
from rollq.buffer.store.connection import Patience, wait_out
from rollq.buffer.store.redis_errors import Trouble

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

PLACE = "store"
AT_ONCE = 8
"""Payloads that are written or read at the same time."""
MARKER = "this-run"


class ObjectPayloads:
    """A `PayloadStore`. It keeps what the file system or the object store keeps.

    `folder()` is that of the run's objects; it is asked for when it is first needed.
    """

    def __init__(self, url: str, folder: Callable[[], str], patience: Callable[[], Patience]) -> None:
        """Raises `ConfigError` for a URL that names neither a folder that exists nor a bucket."""
        self.url = url
        self._folder = folder
        self._patience = patience
        self._store = _open(url)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="payloads")

    def write(self, payloads: Mapping[PayloadName, bytes]) -> None:
        """Store payloads; each appears complete or not at all."""
        self._each(lambda name: self._put(self._path(name), payloads[name]), list(payloads))

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, bytes | None], T]) -> list[T]:
        """Read payloads, several at a time."""
        futures = [self._threads.submit(self._read, name) for name in names]
        return [decode(index, future.result()) for index, future in enumerate(futures)]

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """The size of each; 0 where it is gone."""
        return self._each(self._size, names)

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads."""
        self._each(lambda name: self._remove(self._path(name)), names)

    def pages(self) -> Iterator[list[PayloadName]]:
        """All payloads of this incarnation of the run."""
        import obstore

        folder = self._folder()
        listing = iter(obstore.list(self._store, folder))
        while (page := self._wait_out(lambda: next(listing, None))) is not None:
            yield [name for entry in page if (name := _name(entry["path"].removeprefix(f"{folder}/")))]

    def mark(self, folder: str) -> None:
        """Mark the folder of a run as this run's."""
        self._put(f"{folder}/{MARKER}", b"")

    def unmark(self, folder: str) -> None:
        """Take the mark back, of a run that was not created."""
        self._remove(f"{folder}/{MARKER}")

    def check_marker(self) -> None:
        """Raise `ConfigError` unless the run began with this folder or bucket."""
        if self._head(f"{self._folder()}/{MARKER}") is None:
            raise ConfigError(
                f"payloads.url = {self.url!r} has nothing of this run: it began with another folder or bucket. Give "
                "every role the same; a folder must be shared by all machines, as one on NFS is"
            )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: PayloadName) -> str:
        return f"{self._folder()}/{name.task}/{name.group_id}/{name.leaf}"

    def _put(self, path: str, payload: bytes) -> None:
        import obstore

        # a folder has no parts of objects that could be sent at the same time
        in_parts = None if self.url.startswith("s3:") else False
        try:
            self._wait_out(lambda: obstore.put(self._store, path, payload, use_multipart=in_parts))
        except FileNotFoundError as error:
            raise ServerRefused(f"payloads.url = {self.url!r}: the bucket or the folder is not there") from error

    def _read(self, name: PayloadName) -> bytes | None:
        import obstore

        try:
            return self._wait_out(lambda: obstore.get(self._store, self._path(name)).bytes().to_bytes())
        except FileNotFoundError:
            return None

    def _size(self, name: PayloadName) -> int:
        found = self._head(self._path(name))
        return 0 if found is None else found["size"]

    def _head(self, path: str) -> "ObjectMeta | None":
        import obstore

        try:
            return self._wait_out(lambda: obstore.head(self._store, path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self._wait_out(lambda: obstore.delete(self._store, path))

    def _each(self, do: Callable[[PayloadName], T], names: Sequence[PayloadName]) -> list[T]:
        return list(self._threads.map(do, names))

    def _wait_out(self, do: Callable[[], T]) -> T:
        """`do()`, repeated while the store is away. Raises `FileNotFoundError` for an object that is not there."""
        from obstore.exceptions import BaseError

        return wait_out(do, self._patience(), name=f"payloads.url = {self.url!r}", fails=BaseError, explain=_explain)


def _open(url: str) -> "ObjectStore":
    if url.startswith("s3:"):
        return open_bucket(url, {"timeout": "120s"}, what="payloads")
    try:
        from obstore.store import LocalStore
    except ImportError as error:
        raise ConfigError(f"payloads in a folder need obstore ({error}): pip install 'rollq[s3]'") from error
    if not Path(url).is_absolute() or not Path(url).is_dir():
        raise ConfigError(f"payloads.url = {url!r}: is neither s3://bucket/prefix nor the absolute path of a folder")
    return LocalStore(prefix=url)


def _explain(error: Exception) -> Trouble:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        remedy = "give this role the right to read, write, list and delete there"
        return Trouble(ServerRefused, remedy, passes=False)
    return Trouble(ServerUnavailable, "see that it answers, and has room", answered=False)


def _name(path: str) -> PayloadName | None:
    task, _, rest = path.partition("/")
    return PayloadName.parse(task, f"{PLACE}:{rest.replace('/', ':', 1)}")
