"""Chat templates as text: files, names that they read, and identities. Pure except for reading files.

Templates render in transformers alone; what is here is decided before the first conversation.
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
"""Names of a template whose values come with each conversation."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""The tag with which templates mark what a model wrote: of transformers, unknown to jinja2."""


def read_template(path: Path) -> str:
    """The template in a file. Raises `ConfigError` if it cannot be read, or with the line of an error."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker.chat_template: cannot read {str(path)!r}: {error}") from error
    _names(text, path)
    return text


def check_options(template: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a name that the template never reads, or that has its value from the conversation."""
    if taken := sorted(OWN_NAMES & set(options)):
        raise ConfigError(f"rows.template_options.{taken[0]}: comes with each conversation, so leave it out")
    try:
        names = _names(template)
    except ConfigError:  # a tag that only transformers knows: nobody can say which names it reads
        return
    for option in options:
        if option not in names:
            close = difflib.get_close_matches(option, names, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise ConfigError(f"rows.template_options.{option}: the chat template never reads this name; {remedy}")


def template_identity(folder: Path | None, file: Path | None, options: Mapping[str, Any]) -> str:
    """A template, in `file` or else in the `folder` of a tokenizer, and its options, as one short text.

    Workers with equal texts render alike. Raises `ConfigError` for a file that cannot be read.
    """
    template = read_template(file) if file else _template_in(folder) if folder else ""
    digest = hashlib.sha256(template.encode()).hexdigest()[:16] if template else "none"
    return f"{digest} {orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS).decode()}"


def _template_in(folder: Path) -> str:
    """The template that a folder written by `save_pretrained` has; of several, all as JSON."""
    try:
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    try:
        known = orjson.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template") or ""
    except (OSError, ValueError, AttributeError):
        return ""
    return known if isinstance(known, str) else orjson.dumps(known, option=orjson.OPT_SORT_KEYS).decode()


def _names(template: str, path: Path | None = None) -> frozenset[str]:
    """Every name that a template reads or sets. Raises `ConfigError` with `path` and the line of an error."""
    from jinja2 import Environment, TemplateSyntaxError, nodes  # comes with transformers, late: a worker may need none

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"worker.chat_template: {path}:{error.lineno}: {error.message}") from error
    return frozenset(node.name for node in tree.find_all(nodes.Name))
