"""How rollq reaches a Redis server, and the one place that turns the driver's errors into rollq's.

`connect` is the door: behind it, the server is known to be recent enough, to have Functions and to evict nothing.
`patiently` runs a command and waits out what passes by itself (a restart, a failover, a full disk), with one log line.
Replies of rollq's own functions (`ROLLQ_<CODE> ...`) and replies that tell of a mistake in a command pass through
both untouched. No message, repr or log line made here holds a password.
"""

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollq.buffer.errors import ConfigError, ServerError, ServerRefused, ServerUnavailable

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 15.0
"""After this long without a byte a connection counts as broken."""
MAX_BLOCK_S = 10.0
"""The longest that a blocking command may ask the server to wait; well below the socket's timeout."""
CONNECT_TIMEOUT_S = 5.0

OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server that does not serve, and what ends the wait early.

    `unanswered_s`: nobody answers. `unready_s`: somebody answers, but is loading, failing over, busy. Setting `closed`
    ends every wait at once, for a role that is told to stop during an outage.
    """

    unanswered_s: float = 60.0
    unready_s: float = 60.0
    closed: threading.Event = field(default_factory=threading.Event)


class Trouble(NamedTuple):
    """What a driver's error means: which error it becomes, what the user can do, how long it is worth waiting."""

    error: type[ServerError]
    remedy: str
    answered: bool = True  # False: nobody answered
    passes: bool = True  # False: waiting does not help


UNANSWERED = Trouble(ServerUnavailable, "start it, or correct the URL (`rollq redis` starts one here)", answered=False)
LOGIN = Trouble(
    ServerRefused, "set the right password in ROLLQ_REDIS_PASSWORD, or user and password in the URL", passes=False
)
RIGHTS = Trouble(ServerRefused, "give this user the missing right with `ACL SETUSER`", passes=False)
CLUSTER = Trouble(ServerRefused, "it is a node of a Redis Cluster: give the URL of a plain server", passes=False)

TROUBLES: Mapping[str, Trouble] = {
    "LOADING": Trouble(ServerUnavailable, "it is still loading its data: try again when it has"),
    "BUSY": Trouble(ServerUnavailable, "another client's script blocks it: `redis-cli function kill` or `script kill`"),
    "MASTERDOWN": Trouble(ServerUnavailable, "it is a replica that has lost its primary"),
    "CLUSTERDOWN": Trouble(ServerUnavailable, "the cluster is incomplete: see `redis-cli cluster info`"),
    "TRYAGAIN": Trouble(ServerUnavailable, "the cluster is moving these keys: try again"),
    "NOREPLICAS": Trouble(ServerRefused, "too few replicas are up for its min-replicas-to-write"),
    "MISCONF": Trouble(ServerRefused, "it cannot write to its disk: see its log, free space"),
    "READONLY": Trouble(ServerRefused, "it is a read-only replica: give the URL of the primary"),
    "OOM": Trouble(ServerRefused, "its memory is full: raise maxmemory, or let the trainer catch up", passes=False),
    "NOAUTH": LOGIN,
    "WRONGPASS": LOGIN,
    "NOPERM": RIGHTS,
    "MOVED": CLUSTER,
    "ASK": CLUSTER,
    "CROSSSLOT": CLUSTER,
    "DENIED": Trouble(ServerRefused, "it is in protected mode: give it a password (`requirepass`)", passes=False),
}

# The driver cuts the code off the replies that it has a class for. Subclasses come before their bases.
CODES_BY_CLASS: tuple[tuple[type[driver.RedisError], str], ...] = (
    (driver.BusyLoadingError, "LOADING"),
    (driver.MasterDownError, "MASTERDOWN"),
    (driver.ClusterDownError, "CLUSTERDOWN"),
    (driver.TryAgainError, "TRYAGAIN"),
    (driver.ReadOnlyError, "READONLY"),
    (driver.OutOfMemoryError, "OOM"),
    (driver.AuthenticationError, "NOAUTH"),
    (driver.AuthenticationWrongNumberOfArgsError, "NOAUTH"),
    (driver.NoPermissionError, "NOPERM"),
    (driver.MovedError, "MOVED"),
    (driver.AskError, "ASK"),
    (driver.ClusterCrossSlotError, "CROSSSLOT"),
)

PIPELINE_NOTE = re.compile(r"Command # \d+ \(.*?\) of pipeline caused error: ", re.DOTALL)


def reply_text(error: driver.RedisError) -> str:
    """The server's own words, without the note that the driver puts before errors inside a pipeline."""
    return PIPELINE_NOTE.sub("", str(error), count=1)


def diagnose(error: driver.RedisError) -> Trouble | None:
    """What `error` means; None when it speaks of a command and not of the server."""
    for kind, code in CODES_BY_CLASS:
        if isinstance(error, kind):
            return TROUBLES[code]
    if isinstance(error, driver.ConnectionError | driver.TimeoutError):
        return UNANSWERED
    if isinstance(error, driver.ResponseError):
        return TROUBLES.get(reply_text(error).partition(" ")[0])
    return None


def patiently(client: redis.Redis, do: Callable[[], T], patience: Patience | None = None) -> T:
    """Return `do()`, which sends commands through `client`; call it again while the server is away or not ready.

    `do` must be harmless to repeat: a reply may be lost after the command ran.
    Raises ServerUnavailable or ServerRefused when waiting does not help or `patience` is over.
    """
    patience = patience or Patience()
    started = time.monotonic()
    for attempt in count():
        try:
            result = do()
        except driver.RedisError as error:
            trouble = diagnose(error)
            if trouble is None:
                raise
            wait_s = (patience.unready_s if trouble.answered else patience.unanswered_s) if trouble.passes else 0.0
            over = time.monotonic() - started >= wait_s or patience.closed.is_set()
            message = f"{address(client)}: {reply_text(error)}"
            if over:
                raise trouble.error(f"{message} - {trouble.remedy}") from error
            if attempt == 0:
                log.warning("%s - waiting%s for it", message, f" up to {wait_s:g} s" if wait_s < math.inf else "")
            patience.closed.wait(backoff_s(attempt, random.random()))
        else:
            if attempt:
                log.info("%s serves again after %.1f s", address(client), time.monotonic() - started)
            return result
    raise AssertionError("unreachable: count() has no end")


def backoff_s(attempt: int, jitter: float) -> float:
    """Pause after failed attempt 0, 1, ...: 25 to 50 ms, doubling, up to 1 s. `jitter` in [0, 1) spreads clients."""
    pause_s: float = min(1.0, 0.05 * 2 ** min(attempt, 10))
    return pause_s * (0.5 + 0.5 * jitter)


def connect(url: str, password: str | None = None) -> redis.Redis:
    """Return a client of the server at `url` that is known to serve rollq. Payloads stay bytes.

    Waits for a server that is still loading its data, but only a moment for one that does not answer.
    Raises ConfigError (the URL), ServerUnavailable, ServerRefused (password, rights, version, eviction policy).
    """
    client = open_client(url, password)
    try:
        check_server(client, Patience(unanswered_s=2.0))
    except BaseException:
        client.close()
        raise
    return client


def open_client(url: str, password: str | None = None) -> redis.Redis:
    """Return a client for `url` without talking to the server. A password in the URL wins over `password`.

    Raises ConfigError for a URL that is not `redis://`, `rediss://` or `unix://`, or has options nobody knows.
    """
    check_url(url)
    # One retry at once replaces a pooled connection that died unnoticed; everything longer is `patiently`'s to decide.
    retry = Retry(NoBackoff(), 1, supported_errors=(driver.ConnectionError,))
    tcp_options = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        client = redis.Redis.from_url(
            url,
            password=password,
            protocol=2,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=retry,
            **tcp_options,
        )
        client.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        # The driver's words quote what it could not parse, which may be a password: they are not passed on.
        raise ConfigError(
            f"server URL {mask_url(url)!r}: has an option that is unknown or of the wrong type ({type(error).__name__})"
        ) from None
    return client


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` names a server: `redis[s]://[user:password@]host[:port][/db]` or `unix://path`."""
    shown = mask_url(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"server URL {shown!r}: the port must be 1 to 65535, and IPv6 hosts stand in []") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"server URL {shown!r}: must begin with redis://, rediss:// or unix://")
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/"):
            raise ConfigError(f"server URL {shown!r}: needs an absolute path, as in unix:///run/valkey.sock")
        return
    if not parts.hostname or port == 0:
        raise ConfigError(f"server URL {shown!r}: needs a host and a port from 1, as in redis://localhost:6379/0")
    if parts.path not in ("", "/") and not re.fullmatch(r"/\d{1,5}", parts.path):
        raise ConfigError(f"server URL {shown!r}: what follows the host must be the number of a database, as in /0")


def mask_url(url: str) -> str:
    """`url` with user, password and secret options replaced by `***`, even when it is malformed."""
    url = re.sub(r"^([^@/]*://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)([?&][^=&]*password=)[^&]*", r"\1***", url)


def address(client: redis.Redis) -> str:
    """The URL of the server that `client` talks to, without user and password."""
    options = client.connection_pool.connection_kwargs
    database = options.get("db", 0)
    if "path" in options:
        return f"unix://{quote(options['path'])}?db={database}"
    scheme = "rediss" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else "redis"
    host = options.get("host", "localhost")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{options.get('port', 6379)}/{database}"


def cli_command(client: redis.Redis, command: str) -> str:
    """The shell line that sends `command` to `client`'s server; it asks for the password where one is needed."""
    options = client.connection_pool.connection_kwargs
    where = f"-s {options['path']}" if "path" in options else f"-h {options.get('host')} -p {options.get('port', 6379)}"
    tls = " --tls" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else ""
    user = f" --user {options['username']}" if options.get("username") else ""
    login = f"{user} --askpass" if options.get("password") else ""
    return f"redis-cli {where}{tls}{login} {command}"


def check_server(client: redis.Redis, patience: Patience | None = None) -> None:
    """Raise unless the server answers, is recent enough, has Functions, is no cluster node and evicts nothing."""
    patiently(client, client.ping, patience)
    info: Mapping[str, Any] = patiently(client, client.info, patience)
    refusal = unfit(info) or ("" if _has_functions(client) else "it has no Functions (FUNCTION STATS is unknown to it)")
    if refusal:
        raise ServerRefused(f"{address(client)}: {refusal} - rollq needs Redis >= 7.0 or Valkey >= 7.2, not a cluster")
    policy = info.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        fix = cli_command(client, "config set maxmemory-policy noeviction")
        raise ServerRefused(
            f"{address(client)}: its maxmemory-policy is {policy!r}, which would silently drop rollouts - run "
            f"`{fix}`, and write `maxmemory-policy noeviction` into its configuration file"
        )


def unfit(info: Mapping[str, Any]) -> str:
    """Why a server with this INFO cannot serve rollq, whatever its settings; empty when it can."""
    name, oldest = ("valkey", OLDEST_VALKEY) if "valkey_version" in info else ("redis", OLDEST_REDIS)
    version = str(info.get(f"{name}_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < oldest:
        return f"it is {name} {version or 'of unknown version'}"
    if info.get("cluster_enabled"):
        return "it is a node of a cluster"
    return ""


def _has_functions(client: redis.Redis) -> bool:
    try:
        client.function_stats()
    except driver.NoPermissionError:
        return True  # the command exists; roles that load no functions need not see their list
    except driver.ResponseError:
        return False
    return True
