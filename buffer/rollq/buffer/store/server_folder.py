"""The folder of an embedded server for large payloads, which only roles on its machine use.

The folder has a mark with the id that the server has until it stops. The path alone would not be enough: a port may be
forwarded from another machine, and the same path may be another server's folder here.
"""

import os
from contextlib import suppress
from pathlib import Path

from redis import exceptions as driver

from rollq.buffer.common.atomic_files import atomic_file
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.servers import Servers

NAME = "payloads"
MARK = "this+server"
"""A name that no run can have."""


def mark(directory: Path, server_id: str) -> None:
    """Make the folder of the server that has its data in `directory`. `server_id`: the server's `run_id`.

    Raises `OSError`.
    """
    folder = directory / NAME
    folder.mkdir(mode=0o700, exist_ok=True)
    atomic_file(folder / MARK, server_id.encode())


def find(servers: Servers, patience: Patience) -> Path | None:
    """The folder of the server, if it is an embedded one with such a folder, and this process can use it.

    Raises `ServerUnavailable`, `ServerRefused`.
    """
    if servers.spread:
        return None
    (client,) = servers.primaries()

    def ask() -> tuple[str, str] | None:
        try:
            return client.config_get("dir").get("dir") or "", client.info("server")["run_id"]
        except (driver.NoPermissionError, driver.ResponseError):  # a user or a provider without CONFIG
            return None

    answer = servers.patiently(ask, patience)
    if answer is None:
        return None
    folder = Path(_text(answer[0])) / NAME
    with suppress(OSError):
        if (folder / MARK).read_bytes() == _text(answer[1]).encode() and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
    return None


def _text(reply: str | bytes) -> str:
    return os.fsdecode(reply)
