"""Ends a server as a power cut does, with all that was written so far on disk."""

from typing import Any

import redis

from rollq.buffer.store.embedded_server import EmbeddedServer

SYNCED_WITHIN_MS = 30_000


def kill_synced(server: EmbeddedServer, client: redis.Redis) -> None:
    """SIGKILL to a server whose append-only file has all writes, by whomever, that were acknowledged.

    With everysec, one whose last sync is slow keeps acknowledged writes to itself for up to two seconds.
    """
    with client.pipeline(transaction=False) as pipe:
        any_pipe: Any = pipe
        pipe.set("last write", "")
        pipe.delete("last write")
        any_pipe.execute_command("WAITAOF", 1, 0, SYNCED_WITHIN_MS)
        assert pipe.execute()[-1] == [1, 0]
    server.kill()
