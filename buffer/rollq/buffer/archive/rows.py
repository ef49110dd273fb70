"""Converts groups to archive rows and back, without loss."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rollq.buffer.calls.archiving import StoredGroup
from rollq.buffer.calls.group_details import PastLease, past_leases
from rollq.buffer.common import exact_json
from rollq.buffer.errors import ArchiveError, CorruptFrame
from rollq.buffer.rules.staleness import Floors, held_versions
from rollq.buffer.store.scores import NO_TOKENS
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    NO_EPOCH,
    NO_VERSION,
    ArrayRef,
    FinishReason,
    Group,
    PipelineOutput,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.group_fields import decode_kept
from rollq.buffer.wire.prompts import decode_prompt
from rollq.buffer.wire.sample_outcomes import encode_columns

log = logging.getLogger(__name__)

Row = dict[str, Any]
_DECODED = ("reward_parts", "sampling", "tools", "tool_choice", "extra")
"""Fields of a sample that a row holds as JSON."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group of a batch: its position among its task's `batch_groups`, the step's number of groups from all tasks, the
    epoch of the trainer that trained the group, and how the batch's claim counted the age of tokens."""

    group: Group
    position: int
    batch_groups: int
    step_groups: int
    trainer_epoch: int
    floors: Floors
    token_threshold: int | None


def rows_of(run: str, stored: StoredGroup, step: int) -> list[Row]:
    """Return a row for each sample of a group. `step` is the step that trained the group, or the next step when the
    group left.

    If the group's fields cannot be read, logs the error and returns one row with the outcome `damaged`.
    """
    try:
        return _rows_of(run, stored, step)
    except (KeyError, ValueError, OverflowError) as error:
        reason = f"it was modified in the buffer ({type(error).__name__}: {error})"
        log.error("group %s:%d is archived as damaged: %s", stored.task, stored.group_id, reason)
        numbers = {"group_id": stored.group_id, "step": step, "arrival": stored.group_id, "tries": 0}
        record = stored.prompt.decode(errors="replace")
        of_group = {"run": run, "task": stored.task, **numbers, "outcome": "damaged", "reason": reason}
        return [of_group | _sample_columns(0, EMPTY_SAMPLE) | {"prompt_record": record}]


def _rows_of(run: str, stored: StoredGroup, step: int) -> list[Row]:
    fields = stored.fields
    samples = decode_kept(stored.frames, fields["letters"], f"group {stored.task}:{stored.group_id}")
    content = content_of(stored.prompt)
    of_batch = fields if fields.get("left") == "trained" else {}
    of_group = {
        "run": run,
        "task": stored.task,
        "group_id": stored.group_id,
        "outcome": fields.get("left") or fields["status"],
        "reason": fields.get("error"),
        "step": step,
        "position": _int(of_batch.get("position")),
        "batch_groups": _int(of_batch.get("batch_groups")),
        "step_groups": _int(of_batch.get("step_groups")),
        "trainer_epoch": _int(of_batch.get("trainer_epoch")),
        "epoch": _int(fields.get("counted_in")),
        "prompt": content if isinstance(content, str) else _json(content),
        "answer": _json(_record(stored.prompt).get("answer")),
        "prompt_record": stored.prompt.decode(errors="replace"),
        "row": _int(fields.get("row")),
        "source": fields.get("source"),
        "arrival": _int(fields["arrival"]),
        "tries": _int(fields["tries"]),
        "interruptions": _int(fields.get("interruptions", "0")),
        "oldest_version": _oldest_version(fields),
        "floors": of_batch.get("floors"),
        "token_threshold": _int(of_batch.get("token_threshold")),
        "pipeline": fields.get("shaped"),
        "admitted_at": _int(fields.get("admitted_ms")),
        "put_at": _int(fields.get("put_ms")),
        "claimed_at": _int(of_batch.get("claimed_ms")),
        "committed_at": _int(of_batch.get("committed_ms")),
        "left_at": _int(fields.get("left_ms")),
        "generate_ms": _int(fields.get("generate_ms")),
        "leases": _leases(stored),
    }
    return [of_group | _sample_columns(index, sample) for index, sample in enumerate(samples)]


def _leases(stored: StoredGroup) -> list[Row] | None:
    """A group's leases; if they cannot be read, logs this and returns None: leases are only for display, and the rest
    of the group is intact."""
    try:
        return [_lease_columns(lease) for lease in past_leases(stored.fields)]
    except (KeyError, ValueError, OverflowError) as error:
        reason = f"they were modified in the buffer ({type(error).__name__}: {error})"
        log.error("group %s:%d is archived without its leases: %s", stored.task, stored.group_id, reason)
        return None


def _lease_columns(lease: PastLease) -> Row:
    numbers = {"attempt": lease.attempt, "version": lease.version, "leased_at": lease.from_ms, "parts": lease.parts}
    return {
        **{name: int(np.int64(number)) for name, number in numbers.items()},
        "worker": lease.worker,
        "ended_at": lease.until_ms and int(np.int64(lease.until_ms)),
        "outcome": lease.end,
    }


def _sample_columns(index: int, sample: Sample) -> Row:
    def of_segments(name: str) -> list[Any]:
        return [getattr(segment, name) for segment in sample.segments]

    return {
        "sample": index,
        "status": sample.status.name.lower(),
        "finish_reason": sample.finish_reason and sample.finish_reason.value,
        "reward": sample.reward,
        "text": sample.text,
        "error": sample.error,
        "failure": sample.failure and sample.failure.value,
        "worker": sample.extra.get("worker"),
        "session_id": sample.session_id,
        **{name: of_segments(name) for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask")},
        "versions": [[*map(_span_columns, spans)] for spans in of_segments("versions")],
        "arrays": [[_array(name, array) for name, array in arrays.items()] for arrays in of_segments("arrays")],
        **{name: _json(getattr(sample, name)) for name in _DECODED},
    }


def _span_columns(span: VersionSpan) -> Row:
    is_stamped = span.version != NO_VERSION
    return {
        "epoch": span.epoch if is_stamped else None,
        "version": span.version if is_stamped else None,
        "tokens": span.tokens,
    }


def _span(columns: Mapping[str, Any]) -> VersionSpan:
    if columns["version"] is None:
        return VersionSpan(NO_EPOCH, NO_VERSION, columns["tokens"])
    return VersionSpan(columns["epoch"], columns["version"], columns["tokens"])


def _array(name: str, array: Any) -> Row:
    if isinstance(array, ArrayRef):
        beside = {"uri": array.uri, "sha256": array.sha256, "data": None}
        return {"name": name, "dtype": array.dtype, "shape": list(array.shape), **beside}
    data = np.ascontiguousarray(array).tobytes()
    return {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "data": data, "uri": None,
            "sha256": None}  # fmt: skip


def _check_complete(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if [row["sample"] for row in rows] != list(range(len(rows))):
        raise ArchiveError(f"{name}: rows of the archive are missing or duplicated")
    if any(row["status"] == "pending" for row in rows):
        raise ArchiveError(
            f"{name}: its samples could not be read when it was archived; the log of the archiver says why"
        )


def group_of(rows: Sequence[Mapping[str, Any]]) -> TrainedGroup:
    """A batch's group from its rows, as the trainer received it. Raises `ArchiveError` if samples are missing."""
    first = rows[0]
    _check_complete(f"group {first['task']}:{first['group_id']}", rows)
    group = Group(
        first["task"],
        first["group_id"],
        decode_prompt(first["prompt_record"].encode()),
        [sample_of(row) for row in rows],
        NO_TOKENS if first["oldest_version"] is None else first["oldest_version"],
        first["arrival"],
        first["tries"],
        PipelineOutput.decode(first["pipeline"]),
    )
    floors = Floors.decode(first["floors"] or "")
    numbers = (first["position"], first["batch_groups"], first["step_groups"], first["trainer_epoch"])
    return TrainedGroup(group, *numbers, floors, first["token_threshold"])


def letters_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The letters of a group's samples, as Redis keeps them."""
    return "".join(SampleStatus[row["status"].upper()].value for row in rows)


def outcomes_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The outcomes of a group's samples, as Redis holds them."""
    tokens = [sum(span["tokens"] for segment in row["versions"] for span in segment) for row in rows]
    columns = ("reward", "finish_reason", "error", "failure")
    rewards, reasons, errors, failures = ([row[name] for row in rows] for name in columns)
    return encode_columns(rewards, tokens, reasons, errors, failures).decode()


def sample_of(row: Mapping[str, Any]) -> Sample:
    """The sample of a row."""
    columns = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "versions", "arrays")
    segments = zip(*(row[column] for column in columns), strict=True)
    return Sample(
        segments=tuple(_segment(*values) for values in segments),
        status=SampleStatus[row["status"].upper()],
        finish_reason=row["finish_reason"] and FinishReason(row["finish_reason"]),
        reward=row["reward"],
        text=row["text"],
        error=row["error"],
        failure=row["failure"] and FailureKind(row["failure"]),
        session_id=row["session_id"],
        **{name: _tuple(exact_json.loads(row[name])) for name in _DECODED},
    )


def _segment(prompt: Any, response: Any, logprobs: Any, mask: Any, versions: Any, arrays: Any) -> Segment:
    return Segment(
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(response, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=tuple(map(_span, versions)),
        loss_mask=None if mask is None else np.asarray(mask, np.bool_),
        arrays={array["name"]: _array_of(array) for array in arrays},
    )


def _array_of(array: Mapping[str, Any]) -> Any:
    shape = tuple(array["shape"])
    if array["uri"] is not None:
        return ArrayRef(array["uri"], array["sha256"], shape, array["dtype"])
    return np.frombuffer(array["data"], np.dtype(array["dtype"])).reshape(shape)


def _record(prompt: bytes) -> Mapping[str, Any]:
    try:
        decoded = exact_json.loads(prompt)
    except ValueError:  # damaged: the row keeps it unchanged
        return {}
    return decoded if isinstance(decoded, dict) else {}


def content_of(prompt: bytes) -> Any:
    """The content of a stored prompt; the raw text if it is damaged."""
    try:
        return decode_prompt(prompt).content
    except CorruptFrame:
        return prompt.decode(errors="replace")


def _oldest_version(fields: Mapping[str, str]) -> int | None:
    """The version of the oldest remaining token; None without tokens: the trainer gets `NO_TOKENS`."""
    if token_versions := fields.get("token_versions"):
        oldest = min(held_versions(fields["letters"], token_versions), default=None)
    else:
        oldest = _int(fields.get("oldest"))
    if oldest is None or oldest == NO_TOKENS:
        return None
    counted_in, floors = _int(fields.get("counted_in")), Floors.decode(fields.get("floors") or "")
    return oldest if counted_in is None else floors.counted(counted_in, oldest)


def _int(text: str | None) -> int | None:
    return int(np.int64(text)) if text else None


def _json(value: Any) -> str:
    return exact_json.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
