"""Turns observations into text, and text into actions, by templates. Pure.

`{name}` is a field of the observation, and `{name.part}` a part of it; `{{` and `}}` are braces. Braces around anything
but a name stay unchanged.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.environments.tags import last_tagged

Action = Mapping[str, Any] | str
"""The template of an action: a table, or the string "{json}"."""

FIELD: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")
JSON: Final = "{json}"
NAMES: Final = ("text", "answer", "json")
"""Parts of the model's turn that an action may contain."""


class NoSuchField(Exception):
    """A template names a field that an observation does not have."""


class NotAnAction(Exception):
    """The model's text cannot become an action."""


def render(template: str, fields: Mapping[str, Any]) -> str:
    """Fill a template's fields with their values: strings unchanged, other values as JSON. Raises `NoSuchField`."""

    def value(found: re.Match[str]) -> str:
        return found[0][0] if found[1] is None else _shown(look_up(fields, found[1]))

    return FIELD.sub(value, template)


def plain(fields: Mapping[str, Any]) -> str:
    """An observation without a template: the value of its only field, or all fields as JSON. Metadata is ignored."""
    shown = {name: value for name, value in fields.items() if name != "metadata"}
    if not shown:
        return ""
    return _shown(next(iter(shown.values())) if len(shown) == 1 else shown)


def look_up(fields: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path. Raises `NoSuchField`."""
    value: Any = fields
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise NoSuchField(f"{{{path}}}: the observation has {', '.join(fields) or 'no fields'}")
    return value


def make_action(template: Action, text: str) -> dict[str, Any]:
    """The action for the model's text. Raises `NotAnAction` if the template needs JSON and the text has none."""
    made = _filled(template, text)
    if not isinstance(made, dict):
        raise NotAnAction("write one JSON object")
    return made


def names_in(template: Any) -> set[str]:
    """The names in the strings of an action's template."""
    if isinstance(template, str):
        return {found[1] for found in FIELD.finditer(template) if found[1] is not None}
    if isinstance(template, Mapping):
        return set().union(*map(names_in, template.values()))
    return set().union(*map(names_in, template)) if isinstance(template, list | tuple) else set()


def _filled(template: Any, text: str) -> Any:
    if template == JSON:
        return _object_in(text)
    if isinstance(template, str):
        return render(template, {"text": text, "answer": answer_in(text)})
    if isinstance(template, Mapping):
        return {name: _filled(value, text) for name, value in template.items()}
    return [_filled(value, text) for value in template] if isinstance(template, list | tuple) else template


def answer_in(text: str) -> str:
    """The last text within `<answer>` and `</answer>`, or else the whole text, stripped."""
    tagged = last_tagged(text)
    return text.strip() if tagged is None else tagged


def _object_in(text: str) -> Any:
    """The JSON object in a text, from its first brace to its last."""
    try:
        return exact_json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        raise NotAnAction("write one JSON object") from None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else exact_json.dumps(value).decode()
