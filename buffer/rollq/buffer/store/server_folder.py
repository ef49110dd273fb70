"""An embedded server's folder for large payloads, which only roles on its machine use.

A mark in the folder and the server directive `IDENTITY` have the same random text from each start to the next. The path
alone would not be enough: a port may be forwarded from another machine, and the same path may be another server's
folder here.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from redis import exceptions as driver

from rollq.buffer.common.atomic_files import atomic_file
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.servers import Servers

NAME = "payloads"
MARK = "this+server"
"""A name that no run can have."""
IDENTITY = "syslog-ident"
"""A directive that has no effect, since embedded servers do not write to syslog."""
FILES_FACTOR = 3
"""The disk space that a server needs, as a multiple of its memory: an append-only file with twice the data, and the
file's rewritten copy."""


class ServerFolder(NamedTuple):
    """A folder that this process can use, and the disk bytes reserved for the server's own files."""

    path: Path
    reserved_bytes: int


def mark(directory: Path, identity: str) -> None:
    """Make and mark the folder for the server that has its data in `directory`. Raises `OSError`."""
    folder = directory / NAME
    folder.mkdir(mode=0o700, exist_ok=True)
    atomic_file(folder / MARK, identity.encode())


def has_room(path: Path, size_bytes: int, *, reserved_bytes: int) -> bool:
    """Whether a file of this size leaves the reserved part of the disk free. On a full disk, the server would refuse
    all writes, even writes that delete groups."""
    try:
        return shutil.disk_usage(path).free - size_bytes >= reserved_bytes
    except OSError:  # a write says what is wrong
        return True


def find(servers: Servers, patience: Patience) -> ServerFolder | None:
    """The server's folder, if the server is embedded and has such a folder, and this process can use the folder.

    Raises `ServerUnavailable`, `ServerRefused`.
    """
    if servers.spread:
        return None
    (client,) = servers.primaries()
    if not _may_have_one(client.connection_pool.connection_kwargs):
        return None

    def ask() -> Mapping[Any, Any]:
        try:
            return client.config_get("dir", IDENTITY, "maxmemory")
        except driver.ResponseError:  # a server without CONFIG
            return {}

    config = servers.patiently(ask, patience)
    directory, identity = config.get("dir"), config.get(IDENTITY)
    if not (directory and identity):
        return None
    folder = Path(os.fsdecode(directory)) / NAME
    with suppress(OSError):
        if (folder / MARK).read_bytes() == os.fsencode(identity) and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return ServerFolder(folder, FILES_FACTOR * int(config.get("maxmemory", 0)))
    return None


def _may_have_one(connection: Mapping[str, Any]) -> bool:
    """Whether the server may be an embedded server with a folder. Such servers listen on loopback, and have only the
    default user."""
    host = connection.get("host")
    try:
        is_here = "path" in connection or host == "localhost" or ip_address(str(host)).is_loopback
    except ValueError:  # the name of another machine
        return False
    return is_here and connection.get("username") in (None, "", "default")
