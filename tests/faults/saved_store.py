"""The whole content of a server, kept to come back to."""

from collections.abc import Mapping
from typing import Any

import redis


class SavedStore:
    """Every key of a server at the moment of `keep`; functions are not touched."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._keys: Mapping[bytes, tuple[int, bytes]] = {}

    def keep(self) -> None:
        """Remember the present content."""
        names = list(self._client.scan_iter(count=1000))
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.pttl(name)
                pipe.dump(name)
            found = pipe.execute()
        pairs = zip(found[::2], found[1::2], strict=True)
        self._keys = {
            name: (max(0, ttl_ms), value)
            for name, (ttl_ms, value) in zip(names, pairs, strict=True)
            if value is not None  # expired meanwhile
        }

    def restore(self) -> None:
        """Go back to the remembered content."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for name, (ttl_ms, value) in self._keys.items():
                pipe.restore(name, ttl_ms, value)
            pipe.execute()
