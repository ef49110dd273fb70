"""Payloads in a folder that all roles share, or in an S3-compatible object store.

An object is named `<run>/<incarnation>/<task>/<group>.<leaf>`. A marker beside the objects shows roles that the run was
created with this folder or bucket. A folder without the marker has lost nothing: its file system is not mounted.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from rollq.buffer.errors import ConfigError, ServerRefused
from rollq.buffer.payloads.folders_and_buckets import open_objects
from rollq.buffer.payloads.interface import Frame, PayloadName, T, Write
from rollq.buffer.store.connection import Patience, wait_out
from rollq.buffer.wire.joined_frame import Pieces

PLACE = "store"
AT_ONCE = 8
"""The number of payloads that are written or read concurrently."""
AT_ONCE_FROM = 4 << 20
"""The smallest payload for which a thread pays off on a local disk, in bytes."""
MARKER = "this+run"
"""A name that no task can have."""
PROBE = b"rollq doctor"


class ObjectPayloads:
    """A `PayloadStore` that is as durable as the file system or the object store. `folder()` returns the folder for the
    run's objects, and is not called before the first use. `check_run()` raises `StoreLost` if the run was deleted.
    """

    def __init__(
        self,
        url: str,
        folder: Callable[[], str],
        check_run: Callable[[], None],
        patience: Callable[[], Patience],
        *,
        of_server: bool = False,
    ) -> None:
        """Raises `ConfigError` unless the URL names an existing folder or a bucket.

        With `of_server`, the URL names an embedded server's folder, which is as durable as its append-only file.
        """
        self._name = f"folder {url!r} of the embedded server" if of_server else f"payloads.url = {url!r}"
        self._folder = folder
        self._check_run = check_run
        self._patience = patience
        self._objects = open_objects(url, fsync="everysec" if of_server else "no")
        self._at_once_from = AT_ONCE_FROM if of_server else 0
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="payloads")

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """Store payloads, several at once, while the block makes further payloads."""
        futures: list[Future[None]] = []

        def write(name: PayloadName, payload: bytes | Pieces) -> None:
            if len(payload) < self._at_once_from:
                self._write(self._path(name), payload)
            else:
                futures.append(self._threads.submit(self._write, self._path(name), payload))

        yield write
        for future in futures:
            future.result()

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, Frame | None], T]) -> list[T]:
        """Read payloads, several at once."""
        read = list(map(self._begin_to_read, map(self._path, names)))
        return [decode(index, payload()) for index, payload in enumerate(read)]

    def _begin_to_read(self, path: str) -> Callable[[], Frame | None]:
        """Start a read; returns a function that returns the payload, or None if it is gone."""
        if self._at_once_from and (self._find(self._objects.size_bytes, path) or 0) < self._at_once_from:
            return partial(self._find, self._objects.get, path)
        return self._threads.submit(self._find, self._objects.get, path).result

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """Each payload's size; 0 if the payload is gone."""
        size_bytes = self._objects.size_bytes
        return list(self._threads.map(lambda name: self._find(size_bytes, self._path(name)) or 0, names))

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads."""
        list(self._threads.map(lambda name: self._remove(self._path(name)), names))

    def pages(self) -> Iterator[list[PayloadName]]:
        """All payloads of this run incarnation."""
        listing = self._objects.pages(self._folder())
        while (page := self._wait_out(lambda: next(listing, None))) is not None:
            yield [name for path in page if (name := _payload_name(path))]

    def mark(self, folder: str) -> None:
        """Mark a folder as this run's."""
        self._put(f"{folder}/{MARKER}", b"")

    def unmark(self, folder: str) -> None:
        """Remove the mark for a run that was not created."""
        self._remove(f"{folder}/{MARKER}")

    def check_marker(self) -> None:
        """Raise `ConfigError` unless the run was created with this folder or bucket."""
        if self._size_bytes(self._marker) is None:
            raise ConfigError(
                f"{self._name} has nothing of this run, which was created with another folder or bucket. Give every "
                "role the same one; all machines must share a folder, for example over NFS"
            )

    def remove_run(self, folder: str) -> None:
        """Remove everything that a run has here."""
        self._wait_out(lambda: self._objects.remove_folder(folder))

    def probe(self, path: str, folder: str) -> None:
        """Write an object at `path`, read it, list `folder`, and remove the object. Raises `ServerUnavailable` and
        `ServerRefused`."""
        self._put(path, PROBE)
        try:
            if bytes(self._get(path) or b"") != PROBE:
                raise ServerRefused(f"{self._name}: an object that was just written cannot be read")
            self._wait_out(lambda: next(self._objects.pages(folder), None))
        finally:
            self._remove(path)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    def _path(self, name: PayloadName) -> str:
        return f"{self._folder()}/{name.task}/{name.group_id}.{name.leaf}"

    @property
    def _marker(self) -> str:
        return f"{self._folder()}/{MARKER}"

    def _write(self, path: str, payload: bytes | Pieces) -> None:
        """Store a payload in the run's folder. A folder accepts files even while its file system is not mounted."""

        def do() -> None:
            self._check_mounted()
            self._objects.put(path, payload)
            try:
                self._check_mounted()
            except self._objects.failure:
                self._withdraw(path)
                raise

        self._store(do, before_next=self._check_run)  # the folder of a deleted run looks like one that is not mounted

    def _withdraw(self, path: str) -> None:
        with suppress(FileNotFoundError, self._objects.failure):
            self._objects.remove(path)

    def _check_mounted(self) -> None:
        self._objects.check_mounted(self._marker)

    def _find(self, ask: Callable[[str], T], path: str) -> T | None:
        """The result of `ask(path)` for a payload; None if the payload is gone."""

        def do() -> T | None:
            try:
                return ask(path)
            except FileNotFoundError:
                self._check_mounted()
                return None

        return self._wait_out(do)

    def _put(self, path: str, payload: bytes | Pieces) -> None:
        self._store(lambda: self._objects.put(path, payload))

    def _store(self, do: Callable[[], None], before_next: Callable[[], None] | None = None) -> None:
        try:
            self._wait_out(do, before_next)
        except FileNotFoundError as error:
            raise ServerRefused(f"{self._name}: the bucket or the folder is not there") from error

    def _get(self, path: str) -> Frame | None:
        try:
            return self._wait_out(lambda: self._objects.get(path))
        except FileNotFoundError:
            return None

    def _size_bytes(self, path: str) -> int | None:
        try:
            return self._wait_out(lambda: self._objects.size_bytes(path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._wait_out(lambda: self._objects.remove(path))

    def _wait_out(self, do: Callable[[], T], before_next: Callable[[], None] | None = None) -> T:
        """Call `do`, and retry while the store is unavailable, calling `before_next` before each retry. Raises
        `FileNotFoundError` if the object does not exist."""
        objects = self._objects
        return wait_out(
            do,
            self._patience(),
            name=self._name,
            before_next=before_next,
            fails=objects.failure,
            explain=objects.explain,
        )


def _payload_name(path: str) -> PayloadName | None:
    task, _, rest = path.partition("/")
    return PayloadName.parse(task, f"{PLACE}:{rest.replace('.', ':', 1)}")
