"""The library of Redis functions: assembled from `lua/*.lua`, loaded, called; its error codes become our errors.

Nothing else in rollq calls FCALL. The schema version is part of the library's and every function's name, so that
builds of two schemas can serve their runs side by side on one server.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

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
    StaleWorker,
    StoreLost,
    TrainerHeld,
    VersionFalls,
)
from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.store.pipelining import pipeline
from rollq.buffer.store.redis_errors import reply_text
from rollq.buffer.store.redis_url import cli_command

SCHEMA = 1
LIBRARY = f"rollq_{SCHEMA}"
READ_ONLY = frozenset({"counts", "inspect", "ready", "save_group", "save_index"})
REFUSED_WHEN_FULL = frozenset({"admit", "fill_batch", "restore_groups"})
"""All other functions also run on a server whose memory is full, so that it can drain."""


ERRORS: Mapping[str, type[RollqError]] = {
    "STORE_LOST": StoreLost,
    "RUN_MISMATCH": RunMismatch,
    "FENCED": FencedError,
    "TRAINER_HELD": TrainerHeld,
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


@cache
def library_source() -> str:
    """The Lua source of the whole library: shared part, functions in order of their names, registrations."""
    folder = resources.files("rollq.buffer") / "lua"
    names = sorted(path.name[:-4] for path in folder.iterdir() if path.name.endswith(".lua") and path.name[0] != "_")
    parts = [f"#!lua name={LIBRARY}", (folder / "_common.lua").read_text()]
    for name in names:
        parts.append((folder / f"{name}.lua").read_text())
        flags = [] if name in REFUSED_WHEN_FULL else ["'allow-oom'"]
        if name in READ_ONLY:
            flags = ["'no-writes'"]
        parts.append(
            f"redis.register_function{{function_name = '{LIBRARY}_{name}', callback = {name}, "
            f"flags = {{ {', '.join(flags)} }}}}"
        )
    return "\n".join(parts)


def load_library(client: redis.Redis) -> None:
    """Load the library where it is missing; leave an identical one alone.

    Raises `RunMismatch` when the server holds other functions of the same schema version, `ServerRefused` when the
    library is missing and may not be loaded, `ServerUnavailable`.
    """
    source = library_source()
    try:
        code = _loaded_code(client)  # looked for first: a full server refuses to load even what it has
        if code is None:
            _load(client, source)
            code = _loaded_code(client)
    except driver.NoPermissionError:
        return  # roles that may not look rely on an administrator having loaded it
    if code != source:
        raise RunMismatch(
            f"the server holds another build of the functions {LIBRARY!r} "
            f"({_digest(code or '')}, ours is {_digest(source)}): use the same rollq everywhere, or, when no role "
            f"runs, `{cli_command(client, f'function delete {LIBRARY}')}`"
        )


def _load(client: redis.Redis, source: str) -> None:
    try:
        patiently(client, lambda: client.function_load(source))
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


def call(client: redis.Redis, patience: Patience, name: str, key: str, *args: Any) -> Any:
    """Call function `name` on the slot of `key` and return its reply.

    Every function is harmless to repeat, so outages are waited out. Raises the errors of `ERRORS`, `ServerError`.
    """
    command = (_command(name), f"{LIBRARY}_{name}", 1, key, *args)
    try:
        return patiently(client, lambda: client.execute_command(*command), patience)  # type: ignore[no-untyped-call]
    except driver.ResponseError as error:
        raise translate(error) from error


def call_all(client: redis.Redis, patience: Patience, calls: Callable[[], Iterable[Sequence[Any]]]) -> list[Any]:
    """Call several functions in one trip (see `pipeline`); `calls()` are (name, key, arguments ...).

    Returns their replies; that of one that failed is its error.
    """

    def commands() -> Iterator[Sequence[Any]]:
        for name, key, *args in calls():
            yield (_command(name), f"{LIBRARY}_{name}", 1, key, *args)

    def read(_: int, reply: Any) -> Any:
        return translate(reply) if isinstance(reply, driver.ResponseError) else reply

    return pipeline(client, patience, commands, read)


def _command(name: str) -> str:
    return "FCALL_RO" if name in READ_ONLY else "FCALL"


def translate(error: driver.ResponseError) -> Exception:
    """Our error for a function's error reply; `error` itself when it is none of ours."""
    if "Function not found" in reply_text(error):
        return StoreLost("the server has lost rollq's functions, and with them its data: it was started again empty")
    code, _, message = reply_text(error).partition(" ")
    kind = ERRORS.get(code.removeprefix("ROLLQ_")) if code.startswith("ROLLQ_") else None
    return kind(message) if kind else error
