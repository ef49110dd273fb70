"""Reads `env_options` as a kind's model; errors name settings as the user wrote them. Pure."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import Location, changed_types, explain

AnyOptions = TypeVar("AnyOptions", bound=BaseModel)


def read_options(model: type[AnyOptions], options: Mapping[str, Any]) -> AnyOptions:
    """The options as a model. Raises `ConfigError` for an unknown option, or a value of the wrong type."""
    try:
        made = model.model_validate(options)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, model, place=_place))) from error
    if problems := list(changed_types(dict(options), made, _place)):
        raise ConfigError("; ".join(problems))
    return made


def _place(location: Location) -> Location:
    return ("env_options", *location)
