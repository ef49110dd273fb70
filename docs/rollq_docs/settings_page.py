"""Reference of `rollq.toml`: every key with its type, default and meaning, from the models that check it."""

import re
from collections.abc import Iterable

from pydantic import BaseModel

from rollq.cli.settings.reference import Setting, SettingsTable, engine_reference, reference, rows_of
from rollq_docs.markdown import cell, code, table

_PAGE = re.compile(r"docs/(\w+/[\w-]+\.md)")
HEAD = ("key", "type", "default", "meaning")
INTRODUCTION = """\
# Settings

Every key of `rollq.toml`, from the models that check it. All roles read the same file. Unknown keys, and values outside
of the types below, are refused with an error that names them. `rollq settings KEY` prints the same in a terminal, and
[the example](../../examples/rollq.toml) has all of them in a file, with the environment variables that override it.

Each table shows the keys that most runs set. Its advanced ones are folded: their defaults fit a laptop and a fleet.

"""


def settings_page() -> str:
    """The page."""
    return INTRODUCTION + "".join(map(_section, [*reference(), *engine_reference()]))


def table_of(model: type[BaseModel]) -> str:
    """All keys of a model."""
    return table(HEAD, _rows(rows_of(model)))


def _section(part: SettingsTable) -> str:
    common = [setting for setting in part.settings if setting.is_common]
    advanced = [setting for setting in part.settings if not setting.is_common]
    level = "###" if part.name.startswith("[tasks.NAME.") else "##"
    text = f"{level} {part.name or 'Top level'}\n\n{part.about}\n\n"
    if common:
        text += f"{table(HEAD, _rows(common))}\n"
    if advanced:
        names = f"{len(advanced)} advanced"
        text += f'<details markdown="1"><summary>{names}</summary>\n\n{table(HEAD, _rows(advanced))}\n</details>\n\n'
    return text


def _rows(settings: Iterable[Setting]) -> Iterable[tuple[str, ...]]:
    for setting in settings:
        default = {"required": "**required**", "none": "none"}.get(setting.default) or code(setting.default)
        yield code(setting.key), cell(setting.kind), default, _PAGE.sub(r"[\1](../\1)", cell(setting.meaning))
