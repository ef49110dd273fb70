"""Tables of every setting of XTuner and Trinity-RFT, at the end of their pages in docs/migration.

`python -m rollq_docs.migration` writes them, with docs/ in PYTHONPATH. A test compares them with what this makes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from rollq.cli.settings.migration.table import ABSENT, Setting, System, system
from rollq_docs.markdown import cell, table

PAGES: Final[dict[Path, Literal["xtuner", "trinity"]]] = {
    Path(__file__).parents[1] / "migration" / "from-xtuner.md": "xtuner",
    Path(__file__).parents[1] / "migration" / "from-trinity.md": "trinity",
}
TITLE: Final = "## Every setting\n"
HEAD: Final = ("setting", "rollq", "")


def section(name: Literal["xtuner", "trinity"]) -> str:
    """The section of a page, up to its end."""
    source = system(name)
    text = (
        f"{TITLE}\nThese are the settings of {source.name} {source.version}, by class. `NAME` is the name of a task; "
        "evaluations have the same keys. `rollq settings KEY` explains a key. Defaults are "
        f"{source.name}'s, unless the text says otherwise.\n"
    )
    return text + "".join(_group(source, group) for group in source.groups)


def _group(source: System, group: str) -> str:
    base = source.bases.get(group)
    inherits = f"With the settings of `{base}`.\n\n" if base else ""
    settings = source.groups[group].values()
    rows = table(HEAD, _rows(list(settings))) if settings else ""
    return (
        f"\n### {group}\n\n{inherits}{rows}"
        if rows
        else f"\n### {group}\n\n{inherits or 'No settings.'}".rstrip() + "\n"
    )


def _rows(settings: list[Setting]) -> Iterator[tuple[str, str, str]]:
    """A row for each setting, and one for all that have no equivalent for the same reason."""
    yield from (_row(setting) for setting in settings if setting.kind != "none")
    reasons = dict.fromkeys(setting.text for setting in settings if setting.kind == "none")
    for reason in reasons:
        names = [f"`{setting.name}`" for setting in settings if setting.kind == "none" and setting.text == reason]
        yield ", ".join(names), cell(f"none, because {reason}"), ""


def _row(setting: Setting) -> tuple[str, str, str]:
    note = [setting.note] if setting.note else []
    if setting.default is not ABSENT:
        note.append(f"default {_literal(setting.default)}")
    return f"`{setting.name}`", _equivalent(setting), cell("; ".join(note))


def _equivalent(setting: Setting) -> str:
    match setting.kind:
        case "copied" | "translated":
            return ", ".join(f"`{key}`" for key in setting.keys)
        case "table":
            return f"see `{setting.text}`"
        case _:
            return cell(setting.text)


def _literal(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def page(text: str, name: Literal["xtuner", "trinity"]) -> str:
    """A page with its section of this module."""
    return f"{text.partition(TITLE)[0].rstrip()}\n\n{section(name)}"


def write(pages: Iterable[tuple[Path, Literal["xtuner", "trinity"]]]) -> None:
    """Write the sections into the pages."""
    for path, name in pages:
        path.write_text(page(path.read_text("utf-8"), name), "utf-8")


if __name__ == "__main__":
    write(PAGES.items())
