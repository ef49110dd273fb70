"""Answers in JSON, including for errors."""

from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rollq.buffer.common import exact_json
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.errors import ConfigError, QueryError, RollqError


class Missing(Exception):
    """There is no such group."""


class Unreadable(Exception):
    """The run cannot be read at the moment."""


def json_endpoint(do: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that answers with the result of `do`, or with the reason for a failure."""

    def endpoint(request: Request) -> Response:
        try:
            return answer(do(request))
        except Missing as error:
            return answer({"error": str(error)}, 404)
        except (ValueError, QueryError, ConfigError) as error:
            return answer({"error": str(error)}, 400)
        except (Unreadable, RollqError, OSError) as error:
            return answer({"error": str(error)}, 503)

    return endpoint


def answer(found: Any, status: int = 200) -> Response:
    """An answer that must not be cached. `found` is a value, or JSON as bytes."""
    body = found if isinstance(found, bytes) else dumps(found)
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def dumps(found: Any) -> bytes:
    """A value as JSON."""
    return exact_json.dumps(found, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def number_of(request: Request, name: str, default: Any, *, least: int = 0, most: int = 10**9) -> Any:
    """An integer of the query. Raises `ValueError`."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise ValueError(f"{name}={text[:40]}: must be a whole number from {least} to {most}")
    return number
