"""Explains invalid settings: one line per problem, with the key, its value and the allowed values.

No line shows a password: secret keys' values are left out, and passwords in URLs are masked.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollq.buffer.common.toml_words import WORDS, allowed_values
from rollq.buffer.rules.settings import Settings
from rollq.buffer.store.redis_url import mask_url

MAX_VALUE_CHARS = 80

_SAME_TYPE = {(bool, bool), (int, int), (float, float), (int, float)}
"""Pairs of types (in the file, in the settings) that mean the same."""

Location = tuple[str | int, ...]
"""The keys that lead to a value."""


def explain(
    error: ValidationError,
    model: type[BaseModel] | None = None,
    origins: Mapping[str, str] | None = None,
    place: Callable[[Location], Location] = tuple,
) -> list[str]:
    """Return one line per problem that validating a `model` found.

    With `model`, the line about an unknown key lists the allowed keys. `origins` maps key paths to the environment
    variables that set their values. `place` converts a location in the model to the location in the user's file, where
    the two differ.
    """
    return [_line(details, model, origins or {}, place) for details in error.errors(include_url=False)]


def explanation(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems in one line, for messages that name the location themselves."""
    return "; ".join(explain(error, model))


def changed_types(
    data: Any, value: Any, place: Callable[[Location], Location] = tuple, location: Location = ()
) -> Iterator[str]:
    """One line per value whose type pydantic changed silently ("8" to 8, 1 to true), or that TOML does not allow.

    `data` is the content of the file, `value` the settings made from it; `place` is as in `explain`.
    """
    if isinstance(data, dict):
        for key, item in data.items():
            accepted = value[key] if isinstance(value, Mapping) else getattr(value, key)
            yield from changed_types(item, accepted, place, (*location, key))
        return
    path = _dotted(place(location))
    if isinstance(data, float) and not math.isfinite(data):
        yield f"{path} = {data}: must be a finite number"
    elif isinstance(data, int) and not -(2**63) <= data < 2**63:
        yield f"{path}{_shown(path, data)}: must have at most 64 bits"
    elif isinstance(value, bool | int | float) and (type(data), type(value)) not in _SAME_TYPE:
        yield f"{path}{_shown(path, data)}: {WORDS[f'{type(value).__name__}_type']}"


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _line(
    details: ErrorDetails,
    model: type[BaseModel] | None,
    origins: Mapping[str, str],
    place: Callable[[Location], Location],
) -> str:
    path = _dotted(place(details["loc"]))
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{path}: {_unknown(details, model)}"
    if kind == "missing":
        return f"{path}: is required, but missing"
    allowed = allowed_values(details)
    source = f" (from {origins[path]})" if path in origins else ""
    return f"{path}{_shown(path, details['input'])}: {allowed}{source}" if path else allowed


def _shown(path: str, value: Any) -> str:
    leaf = path.rpartition(".")[2]
    if "password" in leaf or not isinstance(value, str | int | float | bool | list):
        return ""
    text = mask_url(repr(value))
    return f" = {text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + '...'}"


def _unknown(details: ErrorDetails, model: type[BaseModel] | None) -> str:
    """The problem with a key that its table does not have, including the right key if known."""
    *section, key = details["loc"]
    owner = None if model is None else _section_model(model, section)
    if owner is None:
        return "unknown key"
    if issubclass(owner, Settings) and key in owner.REMOVED:
        return f"no longer a setting: {owner.REMOVED[str(key)]}"
    return f"unknown key{_hint(str(key), details['input'], model, owner)}"


def _hint(key: str, value: Any, model: type[BaseModel] | None, owner: type[BaseModel]) -> str:
    if places := list(_tables_with(key, model, ())):
        return f"; did you mean {_dotted(places[0])}?"
    tables = [name for name, field in owner.model_fields.items() if _is_table(field.annotation)]
    known: list[Iterable[str]] = [tables, owner.model_fields] if isinstance(value, Mapping) else [owner.model_fields]
    close = [name for names in known for name in difflib.get_close_matches(key, names, n=1)]
    return f"; did you mean {close[0]!r}?" if close else f"; allowed here: {', '.join(owner.model_fields) or 'none'}"


def _tables_with(key: str, model: type[BaseModel] | None, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of a key in a model's tables; tables that users name are left out."""
    for name, field in model.model_fields.items() if model else ():
        kind: Any = field.annotation
        tables: Iterable[type[BaseModel]] = [kind] if _is_model(kind) else _models(kind)
        for table in tables:
            if key in table.model_fields:
                yield (*above, name, key)
            yield from _tables_with(key, table, (*above, name))


def _section_model(model: type[BaseModel], section: list[str | int]) -> type[BaseModel] | None:
    """The settings class at a key path; None if the path leads to anything else."""
    kind: Any = model
    for part in section:
        kind = _item_type(kind, part)
        kind = next(_models(kind), kind)
    return kind if _is_model(kind) else None


def _item_type(kind: Any, key: str | int) -> Any:
    """The type of item `key` in a model or dictionary type."""
    if _is_model(kind):
        field = kind.model_fields.get(str(key))
        return field.annotation if field else None
    return get_args(kind)[1] if get_origin(kind) is dict else kind


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The settings classes in `Model | None`."""
    if get_origin(kind) in (Union, UnionType):
        yield from (part for part in get_args(kind) if _is_model(part))


def _is_table(kind: Any) -> bool:
    """Whether values of a field's type are tables in the file."""
    return _is_model(kind) or get_origin(kind) is dict or any(_models(kind))


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
