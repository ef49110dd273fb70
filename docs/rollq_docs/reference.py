"""The reference: one page for each thing whose names and meanings the code has. Add a page to `PAGES`."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import click

import rollq.buffer.errors
from rollq.buffer.archive.schema import COLUMNS, INCARNATION_KEY, RUN_KEY, VERSION, VERSION_KEY, schema
from rollq.buffer.store import keys
from rollq.buffer.values.curves import CHARTS
from rollq.cli.main import COMMANDS, main
from rollq.monitor.metrics.catalogue import CALLS, METRICS, UP
from rollq_docs.markdown import cell, code, table
from rollq_docs.moves import heads
from rollq_docs.python_pages import PACKAGES, python_page
from rollq_docs.settings_page import settings_page

KEY = re.compile(
    r"(?P<key>rollq:\S+) +(?P<type>\w+) +(?P<content>.*) "
    r"(?P<writer>admin|trainer|workers?|monitor|functions|all|nobody) +(?P<lifetime>.*)"
)
ERROR = re.compile(r"(?P<lines>[ |]*)\|- (?P<name>\w+) +(?P<text>.*)")
WIDE = "---\nhide:\n  - toc\n---\n\n"
"""Front matter of pages with one wide table, which has the place of the table of contents."""


def command_line_page() -> str:
    """Every command with its arguments and options, from click."""
    rows = [(f"[`rollq {name}`](#rollq-{name})", text) for name, (_, text) in COMMANDS.items()]
    parts = ["# Command line\n\n", _exit_statuses(), table(("command", "purpose"), rows)]
    context = click.Context(main, info_name="rollq")
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        parts.append(_command(command, own))
        for part in command.commands.values() if isinstance(command, click.Group) else ():
            parts.append(_command(part, click.Context(part, info_name=part.name, parent=own)))
    return "\n".join(parts)


def _exit_statuses() -> str:
    return (
        "Exit status 2 means wrong settings or arguments, 1 any other error, which is one line that starts with "
        "`error:`. [`rollq doctor`](../guide/operations.md#rollq-doctor) has more of them.\n"
    )


def _command(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    options = [
        (code(first), _plain(cell(second)))
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context))
        for first, second in [record]
    ]
    return "\n".join(
        [f"## {context.command_path}\n", f"```text\n{context.command_path} {usage}\n```\n", _help(command.help or "")]
        + ([table(("option", "meaning"), options)] if options else [])
    )


def _help(text: str) -> str:
    """A command's help. Paragraphs that click prints unchanged, after `\\b`, are blocks of text."""
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        as_is = paragraph.startswith("\b\n")
        parts.append(f"```text\n{paragraph[2:]}\n```" if as_is else _plain(paragraph))
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown must not take for a link."""
    return text.replace("[", "\\[").replace("]", "\\]")


def redis_keys_page() -> str:
    """The table of keys, from the module that builds their names."""
    about, _, rest = inspect.cleandoc(keys.__doc__ or "").partition("\n\n")[2].partition("\n\nkey ")
    rows = []
    for line in rest.splitlines()[1:]:
        match = KEY.fullmatch(line)
        if match is None:
            raise ValueError(f"this is not a row of the table of keys: {line!r}")
        rows.append(
            (code(match["key"]), match["type"], *(cell(match[name]) for name in ("content", "writer", "lifetime")))
        )
    head = ("key", "type", "content", "written by", "lives")
    schema = f"This is schema {keys.SCHEMA_VERSION}. Only read: every write is a call of a function."
    return f"{WIDE}# Redis keys\n\nEvery key that rollq owns. {about}\n\n{schema}\n\n{table(head, rows)}"


def metrics_page() -> str:
    """All metrics, from the catalogue that is served."""
    shown = [
        (code(one.name), "counter" if one.is_counter else "gauge", ", ".join(one.labels) or "-", cell(one.text))
        for one in (UP, CALLS, *METRICS)
    ]
    text = "Served by [`rollq metrics`](../guide/metrics.md). Every metric has the label `run` too."
    return f"{WIDE}# Metrics\n\n{text}\n\n{table(('metric', 'kind', 'labels', 'meaning'), shown)}"


def curves_page() -> str:
    """The numbers by train step, from their table."""
    rows = [
        (code(line.name), cell(line.text), chart.unit or "-", *(code(name) if name else "-" for name in others))
        for chart in CHARTS
        for line in chart.lines
        for others in [(line.trl, line.verl, line.metric)]
    ]
    text = (
        "Each train step has these numbers in `metrics.jsonl`, in trackers, in `rollq status --steps` and on the "
        "dashboard. A `*` is a task, or the name of a part. TRL and verl have the same number, or nearly the same, "
        "under these names."
    )
    head = ("name", "meaning", "unit", "TRL", "verl", "Prometheus")
    return f"{WIDE}# Numbers by train step\n\n{text}\n\n{table(head, rows)}"


def functions_page() -> str:
    """The Redis functions, from the heads of their files."""
    rows = [
        (code(name), *(cell(_plain(head[label])) for label in ("", "Moves", "Caller", "Repeat")))
        for name, head in sorted(heads().items())
    ]
    text = (
        "Every write is one of these functions, which the server runs as a whole. The picture of "
        "[a group's life](../concepts/groups.md) shows their moves. A call may be repeated, or arrive late; the last "
        "column says why that is harmless."
    )
    head = ("function", "does", "moves groups", "caller", "a repeat")
    return f"{WIDE}# Redis functions\n\n{text}\n\n{table(head, rows)}"


def archive_page() -> str:
    """The columns of the archive's files."""
    columns = [(code(field.name), code(str(field.type)), cell(COLUMNS[field.name])) for field in schema()]
    version, *others = (code(key.decode()) for key in (VERSION_KEY, RUN_KEY, INCARNATION_KEY))
    text = (
        f"A row is a sample. This is version {VERSION}, which the metadata of a file has as {version}, with "
        f"{' and '.join(others)}. The [guide](../guide/archive.md) says which groups are written, and when."
    )
    return f"{WIDE}# Archive\n\n{text}\n\n{table(('column', 'type', 'content'), columns)}"


def errors_page() -> str:
    """The tree of errors, from the module that defines most of them."""
    tree, _, places = inspect.cleandoc(rollq.buffer.errors.__doc__ or "").rpartition("\n\n")
    rows = [(_indented(match), cell(match["text"])) for line in tree.splitlines() if (match := ERROR.fullmatch(line))]
    text = (
        "Every error that rollq raises on purpose is a `RollqError`, in `rollq.buffer.errors`. A name that is indented "
        "is a kind of the error above it. Commands print the message on one line."
    )
    return f"{WIDE}# Errors\n\n{text}\n\n{table(('error', 'meaning'), rows)}\n{places}\n"


def _indented(match: "re.Match[str]") -> str:
    return "&emsp;" * match["lines"].count("|") + f"`{match['name']}`"


PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "settings": ("Settings", settings_page),
    "command-line": ("Command line", command_line_page),
    **{f"python/{name.partition('.')[2]}": (name, partial(python_page, name)) for name in PACKAGES},
    "redis-keys": ("Redis keys", redis_keys_page),
    "redis-functions": ("Redis functions", functions_page),
    "metrics": ("Metrics", metrics_page),
    "curves": ("Numbers by train step", curves_page),
    "archive": ("Archive", archive_page),
    "errors": ("Errors", errors_page),
}
"""Page of the reference, without folder and end of its name -> title, and how it is made."""


def pages() -> Iterator[tuple[str, str, str]]:
    """Path, title and text of each page of the reference, but its index."""
    for name, (title, make) in PAGES.items():
        yield f"reference/{name}.md", title, make()
