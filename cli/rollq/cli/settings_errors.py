"""Turns what pydantic says of bad settings into one line per problem: the key, the value, what is allowed.

No line shows a password: values of secret keys are left out, those of URLs are masked.
"""

import difflib
import math
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollq.buffer.store.connection import mask_url

_WORDS = {
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "path_type": "must be a path in quotes",
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
"""TOML's words for what pydantic says in Python's."""

_KEPT = {(bool, bool), (int, int), (float, float), (int, float)}
"""Types in the file and in the settings that mean the same."""


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> list[str]:
    """One line per problem. `origins`: key path -> environment variable that its value came from."""
    return [_line(details, model, origins) for details in error.errors(include_url=False)]


def bent_values(data: Any, value: Any, path: str = "") -> Iterator[str]:
    """One line per value of the file that pydantic bent to another type ("8" to 8, 1 to true): TOML has types.

    `data` is what the file held, `value` what it became.
    """
    if isinstance(data, dict):
        for key, item in data.items():
            became = value[key] if isinstance(value, Mapping) else getattr(value, key)
            yield from bent_values(item, became, f"{path}.{key}" if path else key)
    elif isinstance(data, float) and not math.isfinite(data):
        yield f"{path} = {data}: must be a finite number"
    elif isinstance(value, bool | int | float) and (type(data), type(value)) not in _KEPT:
        yield f"{path}{_shown(path, data)}: {_WORDS[f'{type(value).__name__}_type']}"


def _line(details: ErrorDetails, model: type[BaseModel], origins: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_hint(details, model)}"
    if kind == "missing":
        return f"{path}: is required, but missing"
    message = _WORDS.get(kind, details["msg"].replace("Input should be", "must be", 1))
    allowed = str(details["ctx"]["error"]) if kind == "value_error" else message
    source = f" (from {origins[path]})" if path in origins else ""
    return f"{path}{_shown(path, details['input'])}: {allowed}{source}" if path else allowed


def _shown(path: str, value: Any) -> str:
    leaf = path.rpartition(".")[2]
    if "password" in leaf or not isinstance(value, str | int | float | bool | list):
        return ""
    text = mask_url(repr(value))
    return f" = {text if len(text) <= 80 else text[:77] + '...'}"


def _hint(details: ErrorDetails, model: type[BaseModel]) -> str:
    *section, key = details["loc"]
    owner = _section_model(model, section)
    if owner is None:
        return ""
    close = difflib.get_close_matches(str(key), owner.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed here: {', '.join(owner.model_fields)}"


def _section_model(model: type[BaseModel], section: list[str | int]) -> type[BaseModel] | None:
    """The settings class at a key path; None when the path leads through something else."""
    kind: Any = model
    for part in section:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        kind = next(_models(kind), kind)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The settings classes of `Model | None`."""
    if get_origin(kind) in (Union, UnionType):
        yield from (part for part in get_args(kind) if isinstance(part, type) and issubclass(part, BaseModel))
