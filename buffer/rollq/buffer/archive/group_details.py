"""Converts archive rows to the value that the buffer returns for a group, so that one view shows both. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rollq.buffer.archive.reader import status_of
from rollq.buffer.archive.rows import content_of, letters_of, outcomes_of, sample_of
from rollq.buffer.calls.group_details import FoundGroup, PastLease, TrainStep
from rollq.buffer.common.means import mean_of
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.prompts import decode_prompt


def found_group(rows: Sequence[Mapping[str, Any]], now_ms: int, *, with_samples: bool = False) -> FoundGroup:
    """A group from all its rows, as seen at `now_ms`. Without samples, token and text columns may be missing."""
    first = rows[0]
    record = first["prompt_record"].encode()
    return FoundGroup(
        task=first["task"],
        group_id=first["group_id"],
        status=status_of(first["outcome"]),
        fields={name: str(value) for name, value in _fields(rows).items() if value is not None},
        prompt=_prompt(record),
        samples=tuple(map(sample_of, rows)) if with_samples else (),
        problem="",
        leases=tuple(map(_lease, first["leases"] or ())),
        batch=_batch(first),
        deadline_ms=None,
        server_ms=now_ms,
        is_archived=True,
    )


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The group's fields in the buffer, as far as the archive has them."""
    first = rows[0]
    return {
        "letters": letters_of(rows),
        "reward": mean_of(row["reward"] for row in rows),
        "tokens": sum(span["tokens"] for row in rows for segment in row["versions"] for span in segment),
        "tries": first["tries"],
        "worker": next((row["worker"] for row in rows if row["worker"]), None),
        "error": first["reason"],
        "samples": outcomes_of(rows),
        "prompt": first["prompt_record"],
        "shaped": first["pipeline"],
        "row": first["row"],
        "step": first["step"],
        "left": first["outcome"],
        "admitted_ms": _ms(first["admitted_at"]),
        "put_ms": _ms(first["put_at"]),
        "left_ms": _ms(first["left_at"]),
        "generate_ms": first["generate_ms"],
    }


def _batch(first: Mapping[str, Any]) -> TrainStep | None:
    if first["outcome"] != "trained":
        return None
    return TrainStep(first["step"], _ms(first["claimed_at"]), _ms(first["committed_at"]))


def _lease(columns: Mapping[str, Any]) -> PastLease:
    return PastLease(
        attempt=columns["attempt"],
        worker=columns["worker"],
        version=columns["version"],
        from_ms=round(columns["leased_at"].timestamp() * 1000),
        until_ms=_ms(columns["ended_at"]),
        end=columns["outcome"],
        parts=columns["parts"],
    )


def _prompt(record: bytes) -> Prompt:
    try:
        return decode_prompt(record)
    except CorruptFrame:
        return Prompt(content_of(record))


def _ms(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)
