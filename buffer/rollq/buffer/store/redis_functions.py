"""Loads the Redis functions into servers, calls them, and raises their error codes as rollq errors.

Apart from `mark`, which `pipelining` calls, every function is called here. `rollq.buffer.store.library` has the source.
A server may lack the functions while roles run: somebody deleted them, or the server has joined a cluster. A call that
does not find its function loads the library and is repeated.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import redis
from redis import exceptions as driver

from rollq.buffer.errors import (
    BatchOver,
    BatchRefused,
    CheckpointOverdue,
    ConfigError,
    EpochMoved,
    FencedError,
    HistoryGone,
    NotClaimed,
    RollqError,
    RunMismatch,
    ServerRefused,
    StaleWorker,
    StoreLost,
    TaskBehind,
    TrainerHeld,
    VersionFalls,
)
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.library import READ_ONLY, function_name, library_name, library_source
from rollq.buffer.store.pipelining import Command, Transaction, pipeline
from rollq.buffer.store.redis_errors import reply_text
from rollq.buffer.store.servers import Servers

ERRORS: Mapping[str, type[RollqError]] = {
    "STORE_LOST": StoreLost,
    "RUN_MISMATCH": RunMismatch,
    "FENCED": FencedError,
    "TRAINER_HELD": TrainerHeld,
    "TASK_BEHIND": TaskBehind,
    "STALE_WORKER": StaleWorker,
    "HISTORY_GONE": HistoryGone,
    "CHECKPOINT_OVERDUE": CheckpointOverdue,
    "EPOCH": EpochMoved,
    "NOT_CLAIMED": NotClaimed,
    "COMMITTED": NotClaimed,
    "VERSION_FALLS": VersionFalls,
    "EVALUATION": BatchRefused,
    "NOT_OFFLINE": ConfigError,
    "BATCH_EXISTS": BatchRefused,
    "BATCH_OVER": BatchOver,
}
"""The rollq error for each code that a function's error reply begins with, after "ROLLQ_"."""


def load_library(servers: Servers, patience: Patience | None = None, *, key: str | None = None) -> None:
    """Load the library into every server that lacks it, or only into the server that has `key`.

    Raises `ServerUnavailable`, and `ServerRefused` if the library is missing and this user may not load it.
    """

    def load() -> None:
        for client in servers.primaries() if key is None else [servers.of(key)]:
            _load_where_missing(client)

    try:
        servers.patiently(load, patience or Patience())
    except ServerRefused as error:
        if not isinstance(error.__cause__, driver.NoPermissionError):
            raise
        raise ServerRefused(
            f"the server lacks the functions {library_name()!r}, and this user may not load them: run "
            "`rollq doctor --load-functions` as the operator"
        ) from error


def _load_where_missing(client: redis.Redis) -> None:
    try:
        if client.function_list(library=library_name()):  # a full server refuses to load even what it has
            return
    except driver.NoPermissionError:
        return  # a user that may not list libraries relies on an administrator having loaded this one
    try:
        client.function_load(library_source())
    except driver.ResponseError as error:
        if "already exists" not in str(error):  # it does if another role was quicker
            raise


STAGED_S = 600
"""How long, in seconds, a payload beside a call lasts if the function, which keeps or removes it, never runs."""

Load = Callable[[str], None]
"""Loads the library into the server that has a key, or raises the reason why this is not allowed."""


def call(servers: Servers, patience: Patience, load: Load, name: str, key: str, *args: Any) -> Any:
    """Call function `name` on the slot of `key` and return its reply; `load` is called if the server lacks it.

    Raises the errors of `ERRORS`, and `ServerError`.
    """
    (reply,) = call_all(servers, patience, load, lambda: [(name, key, *args)])
    if isinstance(reply, Exception):
        raise reply
    return reply


class Beside(NamedTuple):
    """A function call, and payloads by key that the same transaction sets unless they exist already.

    So large values do not pass through the function. The function keeps payloads that a group names, and removes the
    others. If it is missing and the caller dies, the payloads expire.
    """

    call: Command
    payloads: Mapping[str, bytes]


Call = Command | Beside
"""A function's name, its key, and its arguments."""


def call_all(servers: Servers, patience: Patience, load: Load, calls: Callable[[], Iterable[Call]]) -> list[Any]:
    """Call several functions in one round trip (see `pipeline`); return their replies, or the error of a failed call.

    Every function is harmless to repeat, so this waits out outages, and after `load`, repeats calls whose server lacked
    the function.
    """

    def send(chosen: Callable[[], Iterable[Call]]) -> list[Any]:
        return pipeline(servers, patience, lambda: map(_command, chosen()), lambda _, reply: reply)

    replies = send(calls)
    if missing := {index for index, reply in enumerate(replies) if _is_missing(reply)}:

        def missed() -> Iterable[Call]:
            return (call for index, call in enumerate(calls()) if index in missing)

        for key in dict.fromkeys(map(_key, missed())):
            load(key)
        for index, reply in zip(sorted(missing), send(missed), strict=True):
            replies[index] = reply
    return [translate(reply) if isinstance(reply, driver.ResponseError) else reply for reply in replies]


def _key(call: Call) -> str:
    _, key, *_ = call.call if isinstance(call, Beside) else call
    return str(key)


def _command(call: Call) -> Command | Transaction:
    if not isinstance(call, Beside):
        return _fcall(call)
    if not call.payloads:
        return _fcall(call.call)
    sets = [("SET", key, payload, "NX", "EX", STAGED_S) for key, payload in call.payloads.items()]
    return Transaction([*sets, _fcall(call.call, *call.payloads)])


def _fcall(call: Command, *more_keys: str) -> Command:
    name, key, *args = call
    command = "FCALL_RO" if name in READ_ONLY else "FCALL"
    return (command, function_name(name), 1 + len(more_keys), key, *more_keys, *args)


def _is_missing(reply: Any) -> bool:
    """Whether the server lacks the function that was called."""
    return isinstance(reply, driver.ResponseError) and "Function not found" in reply_text(reply)


def translate(error: driver.ResponseError) -> Exception:
    """The rollq error for a function's error reply; `error` itself if the reply has no rollq code."""
    if _is_missing(error):
        return ServerRefused(
            f"the server lacks functions of {library_name()!r}: run `rollq doctor --load-functions` as the operator; "
            f"if that changes nothing, use `redis-cli function delete {library_name()}` to delete the library that "
            "has replaced them, and try again"
        )
    code, _, message = reply_text(error).partition(" ")
    kind = ERRORS.get(code.removeprefix("ROLLQ_")) if code.startswith("ROLLQ_") else None
    return kind(message) if kind else error
