"""Deletes functions of releases that no role uses."""

from itertools import chain

import redis
from redis import exceptions as driver

from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.redis_errors import reply_text
from rollq.buffer.store.servers import Servers
from rollq.monitor.doctor.examine import PATIENCE
from rollq.monitor.doctor.facts import read_connections, read_libraries
from rollq.monitor.doctor.libraries import sort_libraries


def delete_unused(servers: Servers) -> list[str]:
    """Delete the libraries of other releases that no connection uses; returns their names.

    A role that connects during the call loads its library again. Raises `ServerRefused` for users who may not list
    connections or delete functions, `ServerUnavailable`.
    """
    deleted = set[str]()

    def delete() -> None:
        libraries = [(client, name) for client in servers.primaries() for name in read_libraries(client)]
        connections = chain.from_iterable(map(read_connections, servers.primaries()))
        unused = sort_libraries({name for _, name in libraries}, connections).unused
        for client, name in libraries:
            if name in unused:
                _delete(client, name)
                deleted.add(name)

    try:
        servers.patiently(delete, PATIENCE)
    except ServerRefused as error:
        if not isinstance(error.__cause__, driver.NoPermissionError):
            raise
        raise ServerRefused(
            "this user may neither see which functions are in use nor delete others: run `rollq doctor --clean` as "
            "the operator"
        ) from error
    return sorted(deleted)


def _delete(client: redis.Redis, library: str) -> None:
    try:
        client.function_delete(library)
    except driver.ResponseError as error:
        if "Library not found" not in reply_text(error):  # another doctor deleted it first
            raise
