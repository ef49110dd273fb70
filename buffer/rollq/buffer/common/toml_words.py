"""Says what an invalid value must be, in the terms of TOML instead of Python's. Pure."""

import re

from pydantic_core import ErrorDetails

WORDS = {
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "path_type": "must be a path in quotes",
    "string_type": "must be a string in quotes",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
"""Pydantic error type -> its meaning in TOML's terms."""


def allowed_values(details: ErrorDetails) -> str:
    """The values that are allowed in place of an invalid one, in TOML's terms."""
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    return WORDS.get(details["type"], re.sub(r"^\w+ should ", "must ", details["msg"]))
