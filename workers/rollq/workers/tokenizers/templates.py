"""Chat templates as text: their files, the names that they read, and their identities. Pure except for reading files.

Only transformers renders templates. These functions run before the first conversation.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from rollq.buffer.errors import ConfigError

TEMPLATE_FILE: Final = "chat_template.jinja"
OWN_NAMES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Names in a template whose values come with each conversation."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""The tag with which templates mark the model's text. Transformers supports the tag, and jinja2 does not."""


def read_template(path: Path) -> str:
    """The template in a file. Raises `ConfigError` if the file cannot be read, or with the line of a template error."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker.chat_template: cannot read {str(path)!r}: {error}") from error
    _names(text, path)
    return text


def check_options(template: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a name that the template never reads, or whose value comes from the conversation."""
    if taken := sorted(OWN_NAMES & set(options)):
        raise ConfigError(f"rows.template_options.{taken[0]}: comes with each conversation, so leave it out")
    try:
        names = _names(template)
    except ConfigError:  # a tag that only transformers knows: the names are unknown
        return
    for option in options:
        if option not in names:
            close = difflib.get_close_matches(option, names, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise ConfigError(f"rows.template_options.{option}: the chat template never reads this name; {remedy}")


def template_identity(folder: Path | None, file: Path | None, options: Mapping[str, Any]) -> str:
    """One short string for a template, in `file` or else in a tokenizer's `folder`, and its options. Workers with equal
    strings render alike. Raises `ConfigError` for a file that cannot be read.
    """
    template = read_template(file) if file else _template_in(folder) if folder else ""
    digest = hashlib.sha256(template.encode()).hexdigest()[:16] if template else "none"
    return f"{digest} {options_text(options)}"


def options_text(options: Mapping[str, Any]) -> str:
    """Options as JSON, which is equal for equal options. Raises `ConfigError` for a value that JSON cannot hold."""
    try:
        return orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:
        raise ConfigError(f"rows.template_options: a value does not fit in JSON: {error}") from error


def _template_in(folder: Path) -> str:
    """The template in a folder written by `save_pretrained`; if there are several, JSON with all of them."""
    try:
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    try:
        known = orjson.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template") or ""
    except (OSError, ValueError, AttributeError):
        return ""
    return known if isinstance(known, str) else orjson.dumps(known, option=orjson.OPT_SORT_KEYS).decode()


def _names(template: str, path: Path | None = None) -> set[str]:
    """The names that a template reads before it sets them. Raises `ConfigError` with `path` and the error's line."""
    # a dependency of transformers, imported late: many workers never need it
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
        return meta.find_undeclared_variables(tree)
    except TemplateSyntaxError as error:
        raise ConfigError(f"worker.chat_template: {path}:{error.lineno}: {error.message}") from error
