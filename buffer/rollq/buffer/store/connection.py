"""Reaches Redis servers, and waits for unavailable servers.

`connect` returns only clients of servers that are recent enough, have Functions and evict nothing. `patiently` runs a
command and waits out temporary failures (a restart, a failover, a full disk), with a log line per minute. Both pass on
errors from rollq's functions (`ROLLQ_<CODE> ...`) and errors about a command unchanged. No message, repr or log line
made here contains a password.
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
from typing import Any, TypeVar

import redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollq.buffer.common.backoff import backoff_s
from rollq.buffer.errors import ConfigError, ServerRefused
from rollq.buffer.store.outage_log import Outages
from rollq.buffer.store.redis_errors import Trouble, diagnose, reply_text
from rollq.buffer.store.redis_url import address, check_url, cli_command, mask_url

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""The longest pause between two tries to reach a server, in seconds, before jitter."""

OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)

T = TypeVar("T")

_outages = Outages()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for an unavailable server, and what ends the wait early. `unanswered_s` applies to a server that
    does not answer, and `unready_s` to a server that answers but is loading, failing over or busy. Setting `closed`
    ends every wait at once, so that a role can stop during an outage.
    """

    unanswered_s: float = 60.0
    unready_s: float = 60.0
    closed: threading.Event = field(default_factory=threading.Event)

    def for_trouble(self, trouble: Trouble) -> float:
        """Seconds to wait for a server with this trouble."""
        if not trouble.passes:
            return 0.0
        return self.unready_s if trouble.answered else self.unanswered_s


def patiently(client: redis.Redis, do: Callable[[], T], patience: Patience | None = None) -> T:
    """Return `do()`, which sends commands through `client`; call it again while the server is down or not ready.

    `do` must be harmless to repeat, since a reply may be lost after the command ran. Raises `ServerUnavailable` or
    `ServerRefused` when waiting does not help or `patience` has run out.
    """
    return wait_out(do, patience or Patience(), name=address(client))


def wait_out(
    do: Callable[[], T],
    patience: Patience,
    *,
    name: str,
    before_next: Callable[[], None] | None = None,
    fails: type[Exception] = driver.RedisError,
    explain: Callable[[Any], Trouble | None] = diagnose,
) -> T:
    """Like `patiently`, for servers that messages call `name`. Calls `before_next` before it repeats `do`. `fails` is
    the error that a server raises when it may be unavailable. `explain` returns the error's meaning, None if it is not
    about a server.
    """
    started_s = time.monotonic()
    for tries in count(1):
        try:
            result = do()
        except fails as error:
            if (trouble := explain(error)) is None:
                if tries > 1:
                    _outages.end(name, time.monotonic())
                raise
            _pause(name, error, trouble, tries, time.monotonic() - started_s, patience)
            if before_next:
                before_next()
        else:
            if tries > 1 and (lasted_s := _outages.end(name, time.monotonic())) is not None:
                log.info("%s serves again after %.1f s", name, lasted_s)
            return result
    raise AssertionError("unreachable: count() has no end")


def _pause(name: str, error: Exception, trouble: Trouble, tries: int, waited_s: float, patience: Patience) -> None:
    """Wait before the next try, or raise the meaning of `error` if there is no next try."""
    wait_s = patience.for_trouble(trouble)
    words = reply_text(error) if isinstance(error, driver.RedisError) else str(error).partition("\n")[0]
    message = f"{name}: {words}"
    if waited_s >= wait_s or patience.closed.is_set():
        _outages.end(name, time.monotonic())
        raise trouble.error(f"{message} - {trouble.remedy}") from error
    if (lasted_s := _outages.due(name, time.monotonic())) is not None:
        limit = f" up to {wait_s:g} s" if wait_s < math.inf else ""
        since = f", for {lasted_s:.0f} s by now" if lasted_s else ""
        log.warning("%s - waiting%s for it%s", message, limit, since)
    pause_s = backoff_s(tries, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=random.random())
    patience.closed.wait(pause_s)


def connect(url: str, password: str | None = None, name: str | None = None) -> redis.Redis:
    """Return a client of the server at `url`, checked to serve rollq. Replies stay bytes. `name` names the client's
    connections in the server's list. Waits for a server that is still loading its data, but only a moment for a server
    that does not answer. Raises ConfigError (the URL), ServerUnavailable, ServerRefused (password, rights, version,
    eviction policy).
    """
    client = open_client(url, password, name)
    try:
        check_server(client, Patience(unanswered_s=2.0))
    except BaseException:
        client.close()
        raise
    return client


def open_client(
    url: str, password: str | None = None, name: str | None = None, *, timeout_s: float = SOCKET_TIMEOUT_S
) -> redis.Redis:
    """Return a client for `url` without talking to the server. A password in the URL takes precedence over `password`.
    `name` names the client's connections in the server's list. After `timeout_s` without a byte, a connection counts as
    broken.

    Raises ConfigError for a URL that is not `redis://`, `rediss://` or `unix://`, or has unknown options.
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
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S),
            retry=retry,
            client_name=name,
            **tcp_options,
        )
        client.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        # The driver's words quote what it could not parse, which may be a password: they are not passed on.
        raise ConfigError(
            f"server URL {mask_url(url)!r}: has an option that is unknown or of the wrong type ({type(error).__name__})"
        ) from None
    if client.connection_pool.connection_kwargs["client_name"] != name:
        raise ConfigError(f"server URL {mask_url(url)!r}: has the option client_name, which rollq sets: leave it out")
    return client


def check_server(client: redis.Redis, patience: Patience | None = None, *, in_cluster: bool = False) -> None:
    """Raise if the server does not answer, is too old, lacks Functions or evicts keys, or is a cluster node without
    `in_cluster`."""
    try:
        patiently(client, client.ping, patience)
    except driver.ResponseError as error:
        if "DB index" not in str(error):
            raise
        number = client.connection_pool.connection_kwargs.get("db")
        raise ConfigError(
            f"{address(client)}: the server has no database {number}; name one that it has, such as /0, or raise its "
            "setting `databases`"
        ) from error
    info: Mapping[str, Any] = patiently(client, client.info, patience)
    functions = patiently(client, lambda: has_functions(client), patience)
    refusal = unfit(info, in_cluster=in_cluster) or (
        "" if functions else "it has no Functions (FUNCTION STATS is unknown to it)"
    )
    if refusal:
        raise ServerRefused(f"{address(client)}: {refusal} - rollq needs Redis >= 7.0 or Valkey >= 7.2")
    check_policy(client, info)


def check_policy(client: redis.Redis, info: Mapping[str, Any]) -> None:
    """Raise `ServerRefused` for a server with this INFO that evicts keys when its memory is full."""
    policy = info.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        fix = cli_command(client, "config set maxmemory-policy noeviction")
        raise ServerRefused(
            f"{address(client)}: its maxmemory-policy is {policy!r}, which would silently drop rollouts - run "
            f"`{fix}`, and write `maxmemory-policy noeviction` into its configuration file"
        )


def unfit(info: Mapping[str, Any], *, in_cluster: bool = False) -> str:
    """Why a server with this INFO cannot serve rollq under any settings; empty if it can.

    A cluster node can serve rollq only with `in_cluster`.
    """
    name, oldest = ("valkey", OLDEST_VALKEY) if "valkey_version" in info else ("redis", OLDEST_REDIS)
    version = str(info.get(f"{name}_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < oldest:
        return f"it is {name} {version or 'of unknown version'}"
    if info.get("cluster_enabled") and not in_cluster:
        return "it is a node of a cluster; name two or more of its nodes, as in redis://a:7000,b:7000/0"
    return ""


def has_functions(client: redis.Redis) -> bool:
    """Whether the server has Functions. Returns True for a user who may not ask."""
    try:
        client.function_stats()
    except driver.NoPermissionError:
        return True  # the command exists; roles that load no functions need not see their list
    except driver.ResponseError:
        return False
    return True
