"""Results as a table in the terminal, as JSON, and as the table in docs/benchmarks.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import Result

TABLE_BEGIN = "<!-- table: written by `python -m benchmarks --write-docs` -->\n"
TABLE_END = "<!-- end of table -->\n"


def as_json(machine: Mapping[str, Any], results: Sequence[Result]) -> bytes:
    """Machine and results as indented JSON."""
    listed = [
        {
            "name": result.name,
            "what": result.what,
            "unit": result.unit,
            "target": result.target,
            "better": result.better,
            "measured": result.measured,
            "quartiles": result.spread,
            "holds": result.holds,
            "details": dict(result.details),
            "profile_us": dict(result.profile_us),
            "values": result.values,
        }
        for result in results
    ]
    return orjson.dumps({"machine": dict(machine), "results": listed}, option=orjson.OPT_INDENT_2) + b"\n"


def print_table(machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Print the results as a table in the terminal."""
    table = Table("what", "target", "measured", "quartiles", "", title=", ".join(f"{v}" for v in machine.values()))
    for result in results:
        colour = "green" if result.holds else "yellow"
        what = f"{result.what}\n[dim]{_details(result)}[/dim]" if result.details else result.what
        table.add_row(what, _target(result), _measured(result), _spread(result), f"[{colour}]{_verdict(result)}")
    Console().print(table)


def write_docs(page: Path, machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Replace the table in a page, and keep the text around it."""
    before, _, rest = page.read_text().partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    page.write_text(before + TABLE_BEGIN + _markdown(machine, results) + TABLE_END + after)


def _markdown(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    rows = [
        f"| {r.what} | {_target(r)} | {_measured(r)} | {_spread(r)} | {_verdict(r)} | {_details(r)} |" for r in results
    ]
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    head = "| what | target | measured | quartiles | verdict | details |\n|---|---|---|---|---|---|\n"
    table = f"\n{facts}\n\n{head}" + "\n".join(rows) + "\n\n"
    profiles = [
        f"- {r.what}: " + ", ".join(f"{part} {us:,.0f}" for part, us in r.profile_us.items())
        for r in results
        if r.profile_us
    ]
    return table + "Where the time for one group goes, in µs:\n\n" + "\n".join(profiles) + "\n\n" if profiles else table


def _target(result: Result) -> str:
    return f"{'≥' if result.better == 'higher' else '≤'} {result.target:,g} {result.unit}"


def _measured(result: Result) -> str:
    return (
        f"{result.measured:,.3g} {result.unit}" if result.measured < 1000 else f"{result.measured:,.0f} {result.unit}"
    )


def _spread(result: Result) -> str:
    first, third = result.spread
    return f"{_number(first)} to {_number(third)}"


def _verdict(result: Result) -> str:
    return "holds" if result.holds else "falls short"


def _details(result: Result) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in result.details.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
