"""OpenEnv's websocket as values: the messages that are sent and received. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollq.buffer.common import exact_json

NO_PLACE: Final = "CAPACITY_REACHED"
INVALID_ACTION: Final = "VALIDATION_ERROR"
SHOWN: Final = 200
"""How many characters of a message an error shows."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The server's answer to a reset or a step. `fields` holds the observation's fields."""

    fields: Mapping[str, Any]
    reward: float | None
    done: bool


class Refused(Exception):
    """The server answered with an error; `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Unreadable(Exception):
    """A message that is not OpenEnv's."""


def write(kind: str, data: Mapping[str, Any] | None = None) -> str:
    """The message `reset`, `step` or `close`."""
    return exact_json.dumps({"type": kind} if data is None else {"type": kind, "data": data}).decode()


def read(text: str) -> Observation:
    """The observation in a message. Raises `Refused` for an error, and `Unreadable`."""
    try:
        message = exact_json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            raise Refused(str(data.get("code", "")), _reason(data))
        if kind == "observation":
            return Observation(dict(data["observation"]), _reward(data.get("reward")), bool(data.get("done", False)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"not an OpenEnv message ({error!r}): {text[:SHOWN]}") from error
    raise Unreadable(f"an unexpected message: {text[:SHOWN]}")


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the reward is {value!r}")
    return float(value)


def _reason(data: Mapping[str, Any]) -> str:
    """An error's message, with the refused fields of an action."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return str(data.get("message", ""))
    return "; ".join(
        f"{'.'.join(str(part) for part in each.get('loc', ()))}: {each.get('msg', '')}".removeprefix(": ")
        for each in errors
    )
