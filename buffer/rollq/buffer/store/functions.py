"""The Redis functions: loaded into a server, called, and their error codes raised as errors of rollq.

Nothing else in rollq calls FCALL. `rollq.buffer.store.library` has the source.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import redis
from redis import exceptions as driver

from rollq.buffer.errors import (
    BatchOver,
    BatchRefused,
    CheckpointOverdue,
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
from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.store.library import LIBRARY, READ_ONLY, library_source
from rollq.buffer.store.pipelining import Command, Transaction, pipeline
from rollq.buffer.store.redis_errors import reply_text
from rollq.buffer.store.redis_url import cli_command
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
    "BATCH_EXISTS": BatchRefused,
    "BATCH_OVER": BatchOver,
}
"""Error of rollq for each code that a function's error reply begins with, after "ROLLQ_"."""


def load_library(servers: Servers) -> None:
    """Load the library into every server that lacks it; leave an identical one alone.

    Raises `RunMismatch` when the server holds other functions of the same version, `ServerRefused` when the
    library is missing and may not be loaded, `ServerUnavailable`.
    """
    for client in servers.primaries():
        _load_where_missing(client)


def _load_where_missing(client: redis.Redis) -> None:
    source = library_source()

    def loaded_code() -> str | None:
        try:
            return _loaded_code(client)
        except driver.NoPermissionError:
            return source  # roles that may not look rely on an administrator having loaded it

    code = patiently(client, loaded_code)  # looked for first: a full server refuses to load even what it has
    if code is None:
        _load(client, source)
        code = patiently(client, loaded_code)
    if code != source:
        raise RunMismatch(
            f"the server holds another build of the functions {LIBRARY!r} "
            f"({_digest(code or '')}, ours is {_digest(source)}): use the same rollq everywhere, or, when no role "
            f"runs, `{cli_command(client, f'function delete {LIBRARY}')}`"
        )


def _load(client: redis.Redis, source: str) -> None:
    try:
        patiently(client, lambda: client.function_load(source))
    except ServerRefused as error:
        if not isinstance(error.__cause__, driver.NoPermissionError):
            raise
        raise ServerRefused(
            f"the server lacks the functions {LIBRARY!r}, and this user may not load them: run `rollq load-functions` "
            "as the operator"
        ) from error
    except driver.ResponseError as error:
        if "already exists" not in str(error):  # it does when another role was quicker
            raise


def _loaded_code(client: redis.Redis) -> str | None:
    """The library's source as the server holds it, whichever of the protocol's shapes the reply has; None without."""
    listing = client.function_list(library=LIBRARY, withcode=True)
    if not listing:
        return None
    entry = listing[0]
    fields = entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
    code = fields.get(b"library_code", fields.get("library_code"))
    return code.decode() if isinstance(code, bytes) else str(code)


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def call(servers: Servers, patience: Patience, name: str, key: str, *args: Any) -> Any:
    """Call function `name` on the slot of `key` and return its reply.

    Raises the errors of `ERRORS`, and `ServerError`.
    """
    (reply,) = call_all(servers, patience, lambda: [(name, key, *args)])
    if isinstance(reply, Exception):
        raise reply
    return reply


class Beside(NamedTuple):
    """A call of a function, and payloads by key that are set in the same transaction, unless they are there already.

    Large values so do not pass through the function.
    """

    call: Command
    payloads: Mapping[str, bytes]


Call = Command | Beside
"""Name of the function, key, arguments."""


def call_all(servers: Servers, patience: Patience, calls: Callable[[], Iterable[Call]]) -> list[Any]:
    """Call several functions in one trip (see `pipeline`). Returns their replies; that of one that failed is its
    error. Every function is harmless to repeat, so outages are waited out."""

    def commands() -> Iterator[Command | Transaction]:
        for call in calls():
            if not isinstance(call, Beside):
                yield _fcall(call)
            elif not call.payloads:
                yield _fcall(call.call)
            else:
                sets = [("SET", key, payload, "NX") for key, payload in call.payloads.items()]
                yield Transaction([*sets, _fcall(call.call, *call.payloads)])

    def read(_: int, reply: Any) -> Any:
        return translate(reply) if isinstance(reply, driver.ResponseError) else reply

    return pipeline(servers, patience, commands, read)


def _fcall(call: Command, *more_keys: str) -> Command:
    name, key, *args = call
    command = "FCALL_RO" if name in READ_ONLY else "FCALL"
    return (command, f"{LIBRARY}_{name}", 1 + len(more_keys), key, *more_keys, *args)


def translate(error: driver.ResponseError) -> Exception:
    """The error of rollq for a function's error reply; `error` itself when the reply has no code of rollq's."""
    # every role loads the functions when it connects, and they persist with the data: a server that has lost the
    # functions has lost the data too
    if "Function not found" in reply_text(error):
        return StoreLost("the server has lost rollq's functions, and with them its data: it was restarted empty")
    code, _, message = reply_text(error).partition(" ")
    kind = ERRORS.get(code.removeprefix("ROLLQ_")) if code.startswith("ROLLQ_") else None
    return kind(message) if kind else error
