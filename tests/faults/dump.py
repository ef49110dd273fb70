"""The store as raw Redis commands show it. Imports nothing from rollq: key names are those of docs/architecture.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

STATUSES = (
    "pending", "running", "completed", "gathered", "cooling", "aborted", "expired", "filtered", "failed", "claimed",
    "archived", "leaving",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskDump:
    """Every key of one task: hashes and their fields as texts, sets as score by group id, frames as their names,
    payloads as group id and name, without those that expire because nobody came to name them, and those that are away
    by their names as groups have them."""

    clock: Mapping[str, str]
    progress: Mapping[str, str]
    sets: Mapping[str, Mapping[int, float]]
    groups: Mapping[int, Mapping[str, str]]
    frames: Mapping[int, frozenset[str]]
    payloads: frozenset[tuple[int, str]]
    away: frozenset[str]
    manifests: Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Dump:
    """The keys of one run."""

    model: Mapping[str, str]
    trainer: Mapping[str, str]
    tasks: Mapping[str, TaskDump]


def dump_run(url: str, run: str, folder: Path | None = None) -> Dump:
    """Read every key of a run, and the names of its payloads in `folder`; nothing else may write meanwhile. A URL with
    several hosts names a cluster."""
    first, *others = url.partition("://")[2].removesuffix("/0").split(",")
    kind = redis.RedisCluster if others else redis.Redis
    options: Any = {"decode_responses": True, "encoding_errors": "replace", "protocol": 2}
    with kind.from_url(f"redis://{first}/0", **options) as client:
        tasks: Any = client.smembers(f"rollq:{{{run}}}:tasks")
        return Dump(
            model=_hash(client, f"rollq:{{{run}}}:model"),
            trainer=_hash(client, f"rollq:{{{run}}}:trainer"),
            tasks={
                task: _dump_task(
                    client, f"rollq:{{{run}:{task}}}:", _away_on(client, run, task) | _away_in(folder, run, task)
                )
                for task in sorted(tasks)
            },
        )


def _away_on(client: Any, run: str, task: str) -> frozenset[str]:
    found = (
        key.split("}:payload:") for key in client.scan_iter(match=f"rollq:{{{run}:{task}:*}}:payload:*", count=1000)
    )
    return frozenset(f"cluster:{tag.rpartition(':')[2]}:{leaf}" for tag, leaf in found)


def _away_in(folder: Path | None, run: str, task: str) -> frozenset[str]:
    found = folder.glob(f"{run}/*/{task}/[!.]*") if folder else ()
    return frozenset("store:" + path.name.replace(".", ":", 1) for path in found)


def _dump_task(client: Any, prefix: str, away: frozenset[str]) -> TaskDump:
    names = [key.removeprefix(prefix) for key in client.scan_iter(match=f"{prefix}*", count=1000)]

    def numbers(kind: str) -> list[int]:
        return sorted(int(name.removeprefix(f"{kind}:")) for name in names if name.startswith(f"{kind}:"))

    found: Any = client
    return TaskDump(
        clock=_hash(client, f"{prefix}clock"),
        progress=_hash(client, f"{prefix}progress"),
        sets={
            name: {int(member): score for member, score in found.zrange(f"{prefix}{name}", 0, -1, withscores=True)}
            for name in (*STATUSES, "by_version", "generating", "suspects")
        },
        groups={number: _hash(client, f"{prefix}group:{number}") for number in numbers("group")},
        frames={number: frozenset(found.hkeys(f"{prefix}rollout:{number}")) for number in numbers("rollout")},
        payloads=frozenset(
            _payload(name) for name in names if name.startswith("payload:") and found.pttl(f"{prefix}{name}") == -1
        ),
        away=away,
        manifests={number: _hash(client, f"{prefix}manifest:{number}") for number in numbers("manifest")},
    )


def _hash(client: redis.Redis, key: str) -> dict[str, str]:
    found: Any = client.hgetall(key)
    return dict(found)


def _payload(name: str) -> tuple[int, str]:
    _, group_id, nonce = name.split(":")
    return int(group_id), nonce
