"""`python -m benchmarks`: measures, prints the table, and writes the JSON of all benchmarks, or with --output of
any."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from benchmarks import (
    archive,
    bystanders,
    claim_at_size,
    cluster,
    dashboard,
    exchange,
    expiry,
    fleet,
    gateway,
    logprobs,
    machine,
    membership,
    production,
    publication,
    ranks,
    report,
    salvage,
    scaling,
    slots,
    spread,
    stores,
    streaming,
    sustained,
    throughput,
    tickets,
    wakeup,
    wanted,
    watched,
    watching,
)
from benchmarks.results import Result

BENCHMARKS: Mapping[str, Callable[[bool], list[Result]]] = {
    "exchange": exchange.measure,
    "tickets": tickets.measure,
    "claim": claim_at_size.measure,
    "expiry": expiry.measure,
    "wakeup": wakeup.measure,
    "fleet": fleet.measure,
    "ranks": ranks.measure,
    "logprobs": logprobs.measure,
    "publication": publication.measure,
    "watching": watching.measure,
    "watched": watched.measure,
    "bystanders": bystanders.measure,
    "archive": archive.measure,
    "dashboard": dashboard.measure,
    "gateway": gateway.measure,
    "production": production.measure,
    "streaming": streaming.measure,
    "sustained": sustained.measure,
    "cluster": cluster.measure,
    "stores": stores.measure,
    "throughput": throughput.measure,
    "salvage": salvage.measure,
    "scaling": scaling.measure,
    "membership": membership.measure,
    "slots": slots.measure,
    "spread": spread.measure,
    "wanted": wanted.measure,
}
BY_NAME = frozenset(
    {"archive", "bystanders", "cluster", "dashboard", "gateway", "membership", "salvage", "scaling", "slots", "spread"}
    | {"production", "stores", "streaming", "sustained", "throughput", "wanted", "watched"}
)
"""Benchmarks that run only with `--only`: they take ten minutes, or need a browser or vLLM (see `make bench-vllm`)."""
RESULTS = Path("benchmarks/results.json")
PAGE = Path("docs/benchmarks.md")


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Run only this; may be repeated.")
@click.option("--quick", is_flag=True, help="Few repetitions on little data, to check that the benchmarks run.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help=f"The results as JSON; without --only, {RESULTS} by default.",
)
@click.option("--write-docs", is_flag=True, help=f"Also update the table in {PAGE}.")
def main(only: Sequence[str], quick: bool, output: Path | None, write_docs: bool) -> None:
    described = {**machine.describe(), "load_per_core_before": round(machine.load_per_core(), 2)}
    results = []
    for name, measure in BENCHMARKS.items():
        if name in only or (not only and name not in BY_NAME):
            click.echo(f"measuring {name} ...", err=True)
            results += measure(quick)
    report.print_table(described, results)
    if (written := output or (None if only else RESULTS)) is not None:
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(report.as_json(described, results))
        click.echo(f"written to {written}", err=True)
    if write_docs:
        report.write_docs(PAGE, described, results)


if __name__ == "__main__":
    main()
