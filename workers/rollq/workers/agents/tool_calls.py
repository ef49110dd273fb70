"""A model's function calls. Pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.errors import RollqError

ID_LENGTH: Final = 9
"""The length of the ids that rollq gives to calls. Mistral's templates accept no other length."""
ROOM: Final = 16
"""How many nesting levels a record may add around a value. orjson writes at most 254 levels."""


class CallError(RollqError, ValueError):
    """The model called a tool incorrectly. Tools may raise this error too. Its message becomes the answer to the
    model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `raw_arguments` holds its arguments as JSON; `id` identifies the call in
    messages."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)
    raw_arguments: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be parsed. The model reads the `problem`."""

    problem: str


def call_id(text: str, index: int) -> str:
    """The id of call number `index` in the turn `text`. Equal turns get equal ids."""
    return hashlib.sha256(f"{index}:{_digest(text)}".encode()).hexdigest()[:ID_LENGTH]


@lru_cache(maxsize=8)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def parse_arguments(name: str, raw_arguments: str, id: str, key: str = "arguments") -> ToolCall | Malformed:
    """A call to `name` with arguments in JSON, which the model wrote under `key`."""
    try:
        arguments = exact_json.loads(raw_arguments)
        exact_json.dumps(nested(arguments))
    except (TypeError, ValueError) as error:
        return Malformed(f'"{key}" of {name!r} must be a JSON object; this is not: {error}')
    if not isinstance(arguments, dict):
        return Malformed(f'"{key}" of {name!r} must be a JSON object')
    return ToolCall(name, arguments, id, raw_arguments)


def nested(value: Any) -> Any:
    """The value inside as many levels as a record may add: if orjson can write the result, a record can hold the
    value."""
    for _ in range(ROOM):
        value = (value,)
    return value
