"""Payloads on the buffer's cluster: each is in its group's slot, so that payloads spread over the primaries."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from rollq.buffer.payloads.interface import Frame, PayloadName, T, Write
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.store.run_store import RunStore
from rollq.buffer.wire.joined_frame import Pieces

PLACE = "cluster"
KEYS_PER_PAGE = 1000
NOTICE_S = 1.0
"""Long enough, in seconds, for a primary that was down to learn that it was replaced. Until then, it lacks the writes
made while it was down."""


class ClusterPayloads:
    """A `PayloadStore`. When a `writing` block ends, the payloads that it stored are on a replica too."""

    def __init__(self, run: RunStore) -> None:
        self._run = run

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """Store payloads in one round trip. Raises `ServerRefused` if a server's memory is full."""
        commands: list[Command] = []

        def write(name: PayloadName, payload: bytes | Pieces) -> None:
            commands.append(("SET", self._key(name), bytes(payload)))

        yield write
        if commands:
            self._run.send_all(commands)

    def read(self, names: Sequence[PayloadName], decode: Callable[[int, Frame | None], T]) -> list[T]:
        """Read payloads; payloads that seem to be gone are read once more."""
        gone: set[int] = set()

        def decode_found(index: int, reply: Any) -> Any:
            if isinstance(reply, Exception):
                raise reply
            if reply is not None:
                return decode(index, reply)
            gone.add(index)
            return None

        found = self._run.send_all([("GET", self._key(name)) for name in names], decode_found)
        for index, reply in self._ask_again("GET", names, sorted(gone)):
            found[index] = decode(index, reply)
        return found

    def sizes_bytes(self, names: Sequence[PayloadName]) -> list[int]:
        """The size of each payload; 0 for a payload that two requests did not find."""
        found = self._run.send_all([("STRLEN", self._key(name)) for name in names])
        for index, reply in self._ask_again("STRLEN", names, [i for i, size in enumerate(found) if not size]):
            found[index] = reply
        return found

    def _ask_again(self, command: str, names: Sequence[PayloadName], gone: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the replies for payloads that seem to be gone, once every node knows which nodes are primaries."""
        if gone:
            self._run.closed.wait(NOTICE_S)
        return zip(gone, self._run.send_all([(command, self._key(names[index])) for index in gone]), strict=True)

    def remove(self, names: Sequence[PayloadName]) -> None:
        """Remove payloads."""
        self._run.send_all([("UNLINK", self._key(name)) for name in names])

    def pages(self) -> Iterator[list[PayloadName]]:
        """All the run's payloads, in pages of about `KEYS_PER_PAGE` keys of any kind."""
        pattern = f"rollq:{{{self._run.run}:*}}:payload:*"
        for client in self._run.servers.primaries():
            cursor = -1
            with suppress(RedisError):  # an unavailable primary is scanned next time
                while cursor != 0:
                    page: Any = client.scan(max(cursor, 0), match=pattern, count=KEYS_PER_PAGE)
                    cursor, keys = page
                    yield [name for key in keys if (name := self._name(key.decode()))]

    def _key(self, name: PayloadName) -> str:
        return task_keys(self._run.run, name.task).payload_away(name.group_id, name.leaf)

    def _name(self, key: str) -> PayloadName | None:
        tag, _, leaf = key.removeprefix(f"rollq:{{{self._run.run}:").partition("}:payload:")
        task, _, group_id = tag.partition(":")
        return PayloadName.parse(task, f"{PLACE}:{group_id}:{leaf}")
