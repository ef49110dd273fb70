"""Looks up keys of `rollq.toml` by dotted name, with `NAME` for a task's name.

The keys and their defaults come from the models that check the file.
"""

import typing
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollq.cli.settings.migration.written import Path
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_settings import EvaluationSettings, TaskSettings
from rollq.cli.settings.task_tables import MAIN, SUBTABLES, field_of
from rollq.workers.groups.task_settings import NOT_TRAINED

MODELS: Final[Mapping[str, type[BaseModel]]] = {"tasks": TaskSettings, "evaluations": EvaluationSettings}


def field_at(key: str) -> FieldInfo | None:
    """The models' field that a key sets, or None if there is no such key."""
    root, *rest = key.split(".")
    if root in MODELS:
        return MODELS[root].model_fields.get(_task_field(rest))
    model: type[BaseModel] | None = RollqSettings
    found: FieldInfo | None = None
    for part in (root, *rest):
        found = model.model_fields.get(part) if model else None
        model = _model(found) if found else None
    return found


def _task_field(rest: list[str]) -> str:
    """The name of the task field that a key sets, or "" if there is no such key."""
    match rest:
        case [_, key] if key in MAIN:
            return key
        case [_, table, key] if key in SUBTABLES.get(table, ()):
            return field_of(table, key)
    return ""


def default_of(key: str) -> Any:
    """A key's default; None without a default."""
    field = field_at(key)
    return None if field is None or field.is_required() else field.get_default(call_default_factory=True)


def is_only_evaluated(path: Path) -> bool:
    """Whether a trained task cannot have this sampling parameter."""
    return path[0] == "tasks" and path[-1] in NOT_TRAINED


def _model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a table, if the field is a table."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
