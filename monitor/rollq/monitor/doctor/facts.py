"""Facts about a server and about folders, as `rollq doctor` reads them. Reading changes nothing.

A fact that could not be read is None: a user may lack the right, or only a process on the server's machine can read it.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.connection import Patience, has_functions, patiently
from rollq.buffer.store.redis_url import address, cli_command
from rollq.monitor.doctor.libraries import PREFIX

SETTINGS = Path("rollq.toml")
"""The settings path in commands if the doctor got no settings."""
PINGS = 20
CONFIG = ("appendfsync", "bind", "dir", "min-replicas-to-write", "protected-mode", "save")
"""The directives to read; `INFO` covers the rest."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a file system: `path` is the nearest folder that exists."""

    path: Path
    writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server, as reached from this machine.

    `cli` is the `redis-cli` command that reaches the server, and `settings` is the run's settings path for other
    commands.
    """

    address: str
    cli: str
    settings: str
    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    functions: bool
    libraries: tuple[str, ...] | None  # names of rollq's function libraries
    connections: tuple[str, ...] | None  # names of all named connections
    user: str | None
    open: bool | None  # whether it serves clients without a login
    local: bool  # whether it is reached over loopback or a socket
    pings_s: tuple[float, ...]
    clock_ahead_s: float  # the server's clock minus this machine's
    space: Space | None  # on the disk with its files, if on this machine

    def number(self, name: str) -> int:
        """A number from INFO; 0 if the server does not report it."""
        return int(self.info.get(name) or 0)


def read_facts(
    client: redis.Redis, patience: Patience, clock: Callable[[], float] = time.time, settings: Path = SETTINGS
) -> ServerFacts:
    """Read the facts about `client`'s server. Raises `ServerUnavailable`, `ServerRefused`."""

    def read(do: Callable[[], T]) -> T:
        return patiently(client, do, patience)

    def read_if_allowed(do: Callable[[], T]) -> T | None:
        try:
            return read(do)
        except (driver.ResponseError, ServerRefused):  # forbidden, or unknown to the server
            return None

    pings_s = tuple(read(lambda: _timed(client.ping)) for _ in range(PINGS))
    config = read_if_allowed(lambda: _texts(client.config_get(*CONFIG)))
    local = is_local(client)
    return ServerFacts(
        address=address(client),
        cli=cli_command(client, "").rstrip(),
        settings=quote(str(settings)),
        info=read(client.info),
        config=config,
        functions=read(lambda: has_functions(client)),
        libraries=read_if_allowed(lambda: read_libraries(client)),
        connections=read_if_allowed(lambda: read_connections(client)),
        user=read_if_allowed(lambda: _text(client.acl_whoami())),
        open=_is_open(client),
        local=local,
        pings_s=pings_s,
        clock_ahead_s=read(lambda: _clock_ahead_s(client, clock)),
        space=_server_space(config) if local else None,
    )


def read_libraries(client: redis.Redis) -> tuple[str, ...]:
    """The names of rollq's function libraries on the server."""
    libraries: Any = client.function_list(library=f"{PREFIX}*")
    return tuple(_text(entry[entry.index(b"library_name") + 1]) for entry in libraries)


def read_connections(client: redis.Redis) -> tuple[str, ...]:
    """The names of the server's named connections, one entry per connection."""
    connections: Any = client.client_list()
    return tuple(name for connection in connections if (name := connection.get("name")))


def read_space(folder: Path) -> Space:
    """The room for files in `folder`, which may not exist yet."""
    path = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return Space(path, os.access(path, os.W_OK), shutil.disk_usage(path).free)


def is_local(client: redis.Redis) -> bool:
    """Whether `client` reaches its server over loopback or a socket of this machine."""
    options = client.connection_pool.connection_kwargs
    host = options.get("host", "localhost")
    return "path" in options or host == "localhost" or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address; False for names."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _timed(do: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    do()
    return time.perf_counter() - started_s


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(found: Mapping[Any, Any]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in found.items()}


def _clock_ahead_s(client: redis.Redis, clock: Callable[[], float]) -> float:
    before_s = clock()
    seconds, microseconds = client.time()
    return float(int(seconds) + int(microseconds) / 1e6 - (before_s + clock()) / 2)


def _server_space(config: Mapping[str, str] | None) -> Space | None:
    """The room for the server's files; None if their folder is not on this machine, as in a container."""
    folder = Path(config.get("dir", "")) if config else None
    return read_space(folder) if folder and folder.is_absolute() and folder.is_dir() else None


def _is_open(client: redis.Redis) -> bool | None:
    """Whether the server answers a client without a login; None if unknown."""
    pool = client.connection_pool
    login = {"username", "password", "credential_provider"}
    options = {name: value for name, value in pool.connection_kwargs.items() if name not in login}
    options["retry"] = Retry(NoBackoff(), 0)
    stranger = redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options))
    with stranger:
        try:
            return bool(stranger.ping())
        except driver.ConnectionError as error:
            return False if _is_refusal(error) else None
        except driver.ResponseError:
            return False
        except driver.RedisError:
            return None


def _is_refusal(error: driver.ConnectionError) -> bool:
    """Whether the server answered with a refusal, which the driver raises as a lost connection."""
    return isinstance(error, driver.AuthenticationError) or str(error).startswith("DENIED")
