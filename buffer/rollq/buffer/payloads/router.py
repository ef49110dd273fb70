"""Routes external payloads: decides which of the run's stores takes a payload, and finds the store that has it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rollq.buffer.errors import ConfigError
from rollq.buffer.payloads import cluster, object_payloads
from rollq.buffer.payloads.interface import Frame, PayloadName, PayloadStore, T, Write
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store import server_folder
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.run_store import RunStore
from rollq.buffer.store.server_folder import ServerFolder
from rollq.buffer.wire.group_fields import is_large

SERVER_FOLDER = "server"
"""The `place` of a run that keeps payloads in an embedded server's folder."""
MIN_BYTES = 1 << 20
"""The smallest frame to store in a bucket or in a folder that roles share."""
SERVER_FOLDER_MIN_BYTES = 512 << 10
"""The smallest frame to store in an embedded server's folder. Smaller frames are faster in its append-only file."""


def out_of_reach(run: str, place: str) -> ConfigError:
    """The error for a role that cannot reach the payloads of a run created with this `place`."""
    if place == SERVER_FOLDER:
        return ConfigError(
            f"run {run!r} keeps large payloads in the folder of its embedded server, which this process cannot use: "
            "start the process on the server's machine as the same user, or set payloads.url to the place where that "
            "folder is mounted"
        )
    return ConfigError(
        f"run {run!r} keeps payloads outside its servers: set payloads.url as for its other roles, or, for a command "
        "with --url, ROLLQ_PAYLOADS_URL; a custom trainer passes payloads=PayloadSettings(url=...) to Connection"
    )


class Payloads:
    """One run's external payloads. Thread-safe."""

    def __init__(self, run: RunStore, settings: PayloadSettings, patience: Callable[[], Patience]) -> None:
        """Raises `ConfigError` unless the URL names an existing folder or a bucket."""
        self._run = run
        self._settings = settings
        self._patience = patience
        self.max_buffer_bytes = settings.max_buffer_bytes
        self._stores: dict[str, PayloadStore] = {}
        self.outside: object_payloads.ObjectPayloads | None = None
        self._server_folder: ServerFolder | None = None
        if run.servers.spread:
            self._stores[cluster.PLACE] = cluster.ClusterPayloads(run)
        if settings.url:
            self._keep_in(settings.url)

    def _keep_in(self, url: str, of: ServerFolder | None = None) -> None:
        self.close()
        self._server_folder = of
        self._min_bytes = self._settings.min_bytes or (SERVER_FOLDER_MIN_BYTES if of else MIN_BYTES)
        self.outside = self._stores[object_payloads.PLACE] = object_payloads.ObjectPayloads(
            url,
            lambda: self.folder(self._run.incarnation),
            self._run.check_alive,
            self._patience,
            of_server=of is not None,
        )

    def find_server_folder(self, created_with: Callable[[], tuple[str, str] | None]) -> None:
        """Use an embedded server's folder if the run was created with it, or will be because no `url` is set.
        `created_with()` returns the run's incarnation and `place`, None before the run is created.
        """
        found = server_folder.find(self._run.servers, self._patience())
        if found and not self._server_folder:
            if not (created := created_with()):
                use = not self._settings.url
            else:  # after a failover to another embedded server, the run's payloads are still in the first one's folder
                incarnation, place = created
                marker = found.path / self.folder(incarnation) / object_payloads.MARKER
                use = place == SERVER_FOLDER and marker.exists()
            if use:
                self._keep_in(str(found.path), found)
        elif self._server_folder and (created := created_with()) and created[1] != SERVER_FOLDER:
            self.close()  # the run was created by a role that cannot use the folder
            self.outside = None
            self._stores.pop(object_payloads.PLACE)
            self._server_folder = None

    @property
    def place(self) -> str:
        """Where a run that this role creates keeps payloads outside its servers; "" for nowhere."""
        if not self.outside:
            return ""
        return SERVER_FOLDER if self._server_folder else object_payloads.PLACE

    @property
    def ignores_url(self) -> bool:
        """Whether `payloads.url` is set although the run was created with its server's folder."""
        return bool(self._settings.url) and self._server_folder is not None

    def __bool__(self) -> bool:
        """Whether external payloads may exist."""
        return bool(self._stores)

    def close(self) -> None:
        """Stop all background work."""
        if self.outside:
            self.outside.close()

    def folder(self, incarnation: str) -> str:
        """The folder of a run's incarnation in a folder or bucket of payloads."""
        return f"{self._run.run}/{incarnation}"

    @property
    def pieces_from(self) -> int | None:
        """The minimum size of frames that may be written in pieces; None without a folder or bucket."""
        return self._min_bytes if self.outside else None

    @property
    def notices_deletion(self) -> bool:
        """Whether storing a payload fails once the run was deleted, since deletion removes its marker in the folder."""
        return self._server_folder is not None

    def place_for(self, size_bytes: int) -> str | None:
        """The place for a new payload of this size; None if the payload stays in its task's slot."""
        if self.outside and size_bytes >= self._min_bytes and self._has_room(size_bytes):
            return object_payloads.PLACE
        if cluster.PLACE in self._stores and is_large(size_bytes):
            return cluster.PLACE
        return None

    def _has_room(self, size_bytes: int) -> bool:
        """Whether the external store may take a payload. Only a server's folder may refuse; other stores wait for free
        space."""
        folder = self._server_folder
        return not folder or server_folder.has_room(folder.path, size_bytes, reserved_bytes=folder.reserved_bytes)

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """Yield a function that stores a payload; all are stored when the block ends. Raises
        `ServerUnavailable` and `ServerRefused`."""
        with ExitStack() as stack:
            writers = {place: stack.enter_context(store.writing()) for place, store in self._stores.items()}
            yield lambda name, payload: writers[name.place](name, payload)

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, Frame | None], T]) -> list[T]:
        """Return `decode(i, payload)` for each payload, with None in place of a payload that is gone."""
        index = {name: number for number, name in enumerate(names)}
        payloads: dict[PayloadName, T] = {}
        for store, in_place in self._by_store(names):

            def decode_mine(number: int, payload: Frame | None, in_place: Sequence[PayloadName] = in_place) -> T:
                return decode(index[in_place[number]], payload)

            payloads |= zip(in_place, store.read(in_place, decode_mine), strict=True)
        return [payloads[name] for name in names]

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """Each payload's size; 0 if the payload is gone."""
        sizes: dict[PayloadName, int] = {}
        for store, in_place in self._by_store(names):
            sizes |= zip(in_place, store.sizes_bytes(in_place), strict=True)
        return [sizes[name] for name in names]

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads; missing ones are ignored."""
        for store, in_place in self._by_store(names):
            store.remove(in_place)

    def pages(self) -> Iterator[list[PayloadName]]:
        """All the run's payloads, a page at a time."""
        for store in self._stores.values():
            yield from store.pages()

    def _by_store(self, names: Sequence[PayloadName]) -> Iterator[tuple[PayloadStore, list[PayloadName]]]:
        by_place: dict[str, list[PayloadName]] = {}
        for name in names:
            by_place.setdefault(name.place, []).append(name)
        for place, in_place in by_place.items():
            if place not in self._stores:
                raise ConfigError(f"a payload of run {self._run.run!r} is not on its servers: set payloads.url")
            yield self._stores[place], in_place
