"""Table `[batch]` of `rollq.toml`: one batch for all tasks, shared by their weights."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rollq.buffer.rules.batch_sizes import share_by_weight
from rollq.buffer.rules.settings import MAX_BATCH_GROUPS, Settings
from rollq.cli.settings.task_tables import place_of

TaskTables = Mapping[str, Mapping[str, Any]]
"""The tables `[tasks.<name>]` as read from the file, by name."""


class BatchStep(Settings):
    """A change of the batch from a train step on; keys that are left out keep their values."""

    step: int = Field(gt=1, description="first train step with this batch")
    groups: int | None = Field(default=None, gt=0, le=MAX_BATCH_GROUPS, description="groups of all tasks together")
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="task -> its new weight; tasks that are left out keep theirs"
    )


class BatchSettings(Settings):
    """The batch of all tasks together."""

    groups: int = Field(gt=0, le=MAX_BATCH_GROUPS, description="groups of all tasks together in one training batch")
    schedule: tuple[BatchStep, ...] = Field(default=(), description="changes of the batch at later train steps")


def share_batch(data: Any) -> Any:
    """The content of `rollq.toml`, with every task's batch size and schedule from `[batch]`.

    Raises `ValueError` for tasks that set their own batch size, and for unusable weights.
    """
    if not isinstance(data, dict) or "batch" not in data or not isinstance(data.get("tasks"), dict):
        return data
    tables = {name: table for name, table in data["tasks"].items() if isinstance(table, dict)}
    try:
        batch = BatchSettings.model_validate(data["batch"])
    except ValidationError:  # reported with its place when the field itself is validated
        sizes: dict[str, dict[str, Any]] = {name: {"batch_groups": 1} | table for name, table in tables.items()}
    else:
        sizes = {name: tables[name] | size for name, size in _sizes(batch, tables).items()}
    return {**data, "tasks": data["tasks"] | sizes}


def _sizes(batch: BatchSettings, tables: TaskTables) -> dict[str, dict[str, Any]]:
    """`batch_groups` and `schedule` of every task."""
    _check_no_sizes(tables)
    weights = {name: _weight(name, table) for name, table in tables.items()}
    shares = _shares(batch, dict(weights))
    first = shares.pop(1)
    for name in tables:
        if weights[name] and not any(share[name] for share in [first, *shares.values()]):
            raise ValueError(f"tasks.{name}: gets no group of any batch: raise its weight, or leave the task out")
    return {
        name: {"batch_groups": first[name], "schedule": [(step, share[name]) for step, share in shares.items()]}
        for name in tables
    }


def _shares(batch: BatchSettings, weights: dict[str, float]) -> dict[int, dict[str, int]]:
    """Train step -> groups of each task from that step on."""
    groups, shares = batch.groups, {1: share_by_weight(batch.groups, list(weights.items()))}
    for change in sorted(batch.schedule, key=lambda change: change.step):
        if unknown := sorted(set(change.weights or {}) - set(weights)):
            raise ValueError(f"batch.schedule: step {change.step} names task {unknown[0]!r}, which does not exist")
        if change.step in shares:
            raise ValueError(f"batch.schedule: step {change.step} is listed twice; steps must increase")
        weights |= change.weights or {}
        groups = change.groups or groups
        shares[change.step] = share_by_weight(groups, list(weights.items()))
    return shares


def _check_no_sizes(tables: TaskTables) -> None:
    for name, table in tables.items():
        for key in ("batch_groups", "schedule"):
            if key in table:
                raise ValueError(
                    f"tasks.{name}.{place_of(key)}: [batch] sets the size of batches; leave one of them out"
                )


def _weight(name: str, table: Mapping[str, Any]) -> float:
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"tasks.{name}.{place_of('weight')} = {weight!r}: must be a number")
    return weight
