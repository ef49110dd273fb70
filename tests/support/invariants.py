"""What must hold for a task at every moment, whatever happened before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE, Status

FINISHED = {Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED, Status.ARCHIVED}
"""Statuses of groups whose samples are all stored."""
OF_A_LEASE = {b"nonce", b"offered", b"offer_calls", b"loans", b"loan_parts"}
"""Fields that a group has only while it is leased."""
READ = """
local sets, groups = {}, {}
for i, key in ipairs(KEYS) do sets[i] = redis.call('ZRANGE', key, 0, -1) end
for id = 1, redis.call('HGET', ARGV[1], 'admitted') or 0 do
  local names = redis.call('HKEYS', ARGV[3] .. id)
  local sizes = {}
  for i, name in ipairs(names) do sizes[i] = redis.call('HSTRLEN', ARGV[3] .. id, name) end
  groups[id] = { redis.call('HGETALL', ARGV[2] .. id), names, sizes }
end
local payloads = {}
for i, key in ipairs(redis.call('KEYS', ARGV[4])) do
  payloads[i] = { key, redis.call('STRLEN', key), redis.call('PTTL', key) }
end
return { sets, groups, payloads, redis.call('HGET', ARGV[1], 'bytes') or '0' }
"""
"""Group ids are given in order of arrival, so all that may exist are known."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One group's own keys: the fields of its hash, and the size of each frame, `WHOLE` also for its payload."""

    fields: Mapping[bytes, bytes]
    sizes: dict[str, int]

    @property
    def names(self) -> set[str]:
        """The names of its frames."""
        return set(self.sizes)

    @property
    def bytes(self) -> int:
        """What its frames take, without parts."""
        size = len(self.fields[b"letters"])
        return sum(taken for name, taken in self.sizes.items() if name == WHOLE or int(name) < size)

    @property
    def frames(self) -> set[int]:
        """The indexes of its frames of samples and parts."""
        return {int(name) for name in self.names if name != WHOLE}

    @property
    def parts(self) -> set[int]:
        """The numbers of the parts that were salvaged of its samples."""
        size = len(self.fields[b"letters"])
        return {field - size for field in self.frames if field >= size}


def check_task(buffer: Buffer, task: str) -> None:
    """Assert conservation, one status per group, and indexes that match what is stored."""
    counts = buffer.counts(task)
    assert counts.unaccounted == 0, counts
    (by_version, generating, suspects, offers, *by_status), stored, total_bytes = _read(buffer, task)
    filed: dict[int, Status] = {}
    for status, ids in zip(Status, by_status, strict=True):
        assert not ids & filed.keys(), f"{ids & filed.keys()} are {status} and something else: {filed}"
        filed |= dict.fromkeys(ids, status)
    assert stored.keys() == filed.keys(), stored.keys() ^ filed.keys()
    for group_id, group in stored.items():
        _check_group(group_id, filed[group_id], group)
    assert total_bytes == sum(group.bytes for group in stored.values())
    assert by_version == {id for id, status in filed.items() if status in (Status.COMPLETED, Status.ABORTED)}
    assert generating == {id for id, status in filed.items() if status is Status.RUNNING}
    assert offers == {id for id, group in stored.items() if b"offered" in group.fields}
    assert {id for id, group in stored.items() if group.fields.keys() & OF_A_LEASE} <= generating
    assert suspects <= {id for id, status in filed.items() if status is Status.PENDING}


def _read(buffer: Buffer, task: str) -> tuple[list[set[int]], dict[int, Stored], int]:
    """Group ids by version, generating, suspect and of each status; every group that has a key; and the bytes that the
    task counts: of one instant, because roles may be at work."""
    keys = task_keys(buffer.run, task)
    names = [keys.by_version, keys.generating, keys.suspects, keys.offers, *map(keys.status, Status)]
    prefixes = [keys.group(0)[:-1], keys.rollout(0)[:-1], f"{keys.prefix}payload:*"]
    client: Any = buffer.servers.of(
        keys.progress
    )  # the driver's types cover replies of every protocol and mode at once
    sets, groups, payloads, total_bytes = client.eval(READ, len(names), *names, keys.progress, *prefixes)
    stored = {
        group_id: Stored(
            dict(zip(fields[::2], fields[1::2], strict=True)),
            {name.decode(): size for name, size in zip(names, sizes, strict=True)},
        )
        for group_id, (fields, names, sizes) in enumerate(groups, start=1)
        if fields or names
    }
    found = {key.decode(): size for key, size, _ in payloads}
    assert all(ttl_ms == -1 for *_, ttl_ms in payloads), "payloads of groups that expire"
    for group_id, group in stored.items():
        if name := group.fields.get(b"payload", b"").decode():
            assert WHOLE not in group.names, "a frame of all samples is a field and a payload"
            if away := PayloadName.parse(task, name):
                (group.sizes[WHOLE],) = buffer.payloads.sizes_bytes([away])
                assert group.sizes[WHOLE] > 0, f"group {group_id} names a payload that is gone"
            else:
                group.sizes[WHOLE] = found.pop(keys.payload(group_id, name))
    assert not found, "payloads that no group names"
    return [set(map(int, ids)) for ids in sets], stored, int(total_bytes)


def _check_group(group_id: int, filed: Status, group: Stored) -> None:
    assert group.fields[b"status"] == filed.value.encode(), (group_id, filed, group)
    assert filed is not Status.PENDING or b"leased" not in group.fields, (group_id, group)
    assert len(group.fields.get(b"history", b"").splitlines()) <= 16, (group_id, group)
    generated = {i for i, letter in enumerate(group.fields[b"letters"].decode()) if letter != "p"}
    size = len(group.fields[b"letters"])
    assert {field for field in group.frames if field < size} <= generated, (group_id, group)
    assert WHOLE not in group.names or generated - group.frames, (group_id, group)
    assert group.parts <= set(range(int(group.fields.get(b"parts", 0)))), (group_id, group)
    if filed in FINISHED:
        assert group.names == {WHOLE}, (group_id, group)
        assert not group.fields.keys() & {b"parts", b"part_bytes"}, (group_id, group)
