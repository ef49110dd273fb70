"""One run in the store: its connection, keys and incarnation, and the ways to send commands.

Every part of the buffer sends its commands through `RunStore`, which waits for an unavailable server and reports a
store that has lost the run, so that no other module needs to handle either.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from threading import Event
from typing import Any, Self

import redis

from rollq.buffer.errors import RunMismatch, StoreLost
from rollq.buffer.store import redis_functions
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.keys import SCHEMA_VERSION, RunKeys, task_keys
from rollq.buffer.store.library import connection_name, library_name
from rollq.buffer.store.pipelining import Command, key_of, pipeline
from rollq.buffer.store.servers import Servers, connect_servers

INCARNATION = re.compile(rb"[0-9a-f]{32}")
"""The identity of a run, as `create_run` makes it."""


class RunStore:
    """The keys of one run, on one server or on the primaries of a cluster.

    Thread-safe; holds no state that another process could not rebuild.
    """

    def __init__(self, servers: Servers, run: str, patience: Patience | None = None) -> None:
        """Use `connect`. `servers` must answer in bytes."""
        self.servers = servers
        self.run = run
        self.keys = RunKeys(run)
        self._patience = patience or Patience()
        self._incarnation: str | None = None

    @staticmethod
    def open_servers(url: str, run: str, password: str | None = None) -> Servers:
        """Open the server or cluster at `url`, with the functions loaded where the keys of `run` are.

        Raises `ConfigError` (an invalid run name), `ServerUnavailable`, `ServerRefused`.
        """
        keys = RunKeys(run)
        servers = connect_servers(url, password, connection_name(library_name()))
        try:
            redis_functions.load_library(servers, key=keys.info)  # other servers get them on the first call
        except BaseException:
            servers.close()
            raise
        return servers

    def close(self) -> None:
        """Close the connections and end every wait for the server."""
        self.closed.set()
        self.servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def client(self) -> redis.Redis:
        """A client of the server that has the keys of the whole run."""
        return self.servers.of(self.keys.info)

    @property
    def patience(self) -> Patience:
        """How long calls wait for an unavailable server."""
        return self._patience

    @property
    def closed(self) -> Event:
        """An event, set when the buffer is closed or its owner stops, that ends every wait for the server."""
        return self._patience.closed

    def wait_out_outages(self, longest_s: float = inf) -> None:
        """From now on, wait for an unavailable server for at most `longest_s`, or until the buffer is closed."""
        self._patience = replace(self._patience, unanswered_s=longest_s, unready_s=longest_s)

    @property
    def incarnation(self) -> str:
        """The run's identity in this store, read once.

        Raises `StoreLost` if the run does not exist, `RunMismatch` if its schema differs from this release's.
        """
        if self._incarnation is None:
            incarnation, schema = self.send("HMGET", self.keys.info, "incarnation", "schema")
            if incarnation is None:
                raise StoreLost(
                    f"run {self.run!r} is not in this store: it was never created here (start a producer, a worker or "
                    "`rollq train`), or the store has lost its data"
                )
            if int(schema) != SCHEMA_VERSION:
                raise RunMismatch(
                    f"run {self.run!r} was created with schema {int(schema)}, this rollq has {SCHEMA_VERSION}: use the "
                    "rollq that created it, or give the run another name"
                )
            self._incarnation = self._checked_incarnation(incarnation)
        return self._incarnation

    def check_alive(self) -> None:
        """Raise `StoreLost` if this incarnation of the run is no longer in the store."""
        found = self.send("HMGET", self.keys.info, "incarnation", "restored_as")
        if self.incarnation.encode() not in found:
            raise StoreLost(f"run {self.run!r} is no longer in this store: it was deleted, or created again")

    def _checked_incarnation(self, found: bytes) -> str:
        """The run's incarnation, which is safe in file names. Raises `RunMismatch` if `found` is not an incarnation."""
        if not INCARNATION.fullmatch(found):
            raise RunMismatch(f"run {self.run!r} has the incarnation {found!r:.80}, which rollq did not write")
        return found.decode()

    def _load_functions(self, key: str) -> None:
        """Load the functions into the server that has `key`, which lacks them. Raises `StoreLost` if the run is gone as
        well: then the server was emptied."""
        if self._incarnation is not None:
            incarnations = self.send("HMGET", self.keys.info, "incarnation", "restored_as")
            if self._incarnation.encode() not in incarnations:
                raise StoreLost(f"the server has lost run {self.run!r} and rollq's functions: it was emptied")
        redis_functions.load_library(self.servers, self._patience, key=key)

    # -- for the parts of the buffer --------------------------------------------------------------------------------

    def call(self, name: str, key: str, *args: Any) -> Any:
        """Call one of rollq's functions. Raises the error that its reply names."""
        return redis_functions.call(self.servers, self._patience, self._load_functions, name, key, *args)

    def call_task(self, name: str, task: str, *args: Any) -> Any:
        """Call a function on a task's clock, with the run's incarnation as the first argument."""
        return self.call(name, task_keys(self.run, task).clock, self.incarnation, *args)

    def call_each(self, calls: Callable[[], Iterable[redis_functions.Call]]) -> list[Any]:
        """Call functions in one round trip; `calls()` yields (name, key, arguments ...), with or without payloads.

        Returns their replies, with an exception in place of the reply of a call that failed.
        """
        return redis_functions.call_all(self.servers, self._patience, self._load_functions, calls)

    def call_all(self, calls: Sequence[redis_functions.Call]) -> list[Any]:
        """Call functions in one round trip. Raises the first error after all of them have run."""
        return [_good(index, reply) for index, reply in enumerate(self.call_each(lambda: calls))]

    def send(self, *command: Any) -> Any:
        """Send a plain command, which must be harmless to repeat, and wait for an unavailable server."""

        def do() -> Any:
            return self.servers.of(key_of(command)).execute_command(*command)  # type: ignore[no-untyped-call]

        return self.servers.patiently(do, self._patience)

    def send_all(self, commands: Sequence[Command], read: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """Send plain commands in one round trip. Returns their replies, or `read(index, reply)` for each.

        `read` runs while later replies still arrive, and gets the exception of a command that the server refused;
        without `read`, such an exception is raised.
        """
        return pipeline(self.servers, self._patience, lambda: commands, read or _good)

    def server_ms(self) -> int:
        """The clock of the server that has the run's keys, in milliseconds since 1970."""
        seconds, microseconds = self.servers.patiently(lambda: self.servers.of(self.keys.info).time(), self._patience)
        return int(seconds) * 1000 + int(microseconds) // 1000


def _good(_: int, reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply
