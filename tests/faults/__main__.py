"""`python -m faults`: the long versions of the fault suite. Each prints a table, and fails on a violation."""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from faults.chaos import ROLES, Outcome, Scene, run_chaos

INVARIANTS = {"lost": ("I1", "I2", "I6"), "twice": ("I3",), "too old": ("I5",), "ranks": ("ranks", "replay")}
"""Columns of the table, and the invariants that they count violations of; `other` counts all others."""
FAULTS_PER_RUN = 100


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """Break rollq on purpose, and check its promises."""


@main.command()
@click.option("--seed", default=1, help="Seed of the first run; each run has the next one.")
@click.option("--faults", default=1000, help="Faults in all, at most 100 in a run.")
@click.option("--fsync", type=click.Choice(["everysec", "always"]), default="everysec")
@click.option("--server", type=click.Choice(["valkey", "redis"]), default="valkey")
@click.option("--only", help="Break only this role: server, producer, worker or trainer.")
@click.option("--keep", is_flag=True, help="Keep the folder of every run, not only of those with violations.")
def chaos(seed: int, faults: int, fsync: str, server: str, only: str | None, keep: bool) -> None:
    """Kill, stop and cut off roles and server at random while a run trains."""
    scenes = [
        Scene(seed + index, min(FAULTS_PER_RUN, faults - at), fsync=fsync, binary=_binary(server), roles=_roles(only))
        for index, at in enumerate(range(0, faults, FAULTS_PER_RUN))
    ]
    _finish([_run(scene, keep=keep) for scene in scenes])


def _binary(server: str) -> Path | None:
    if server == "valkey":
        return None
    found = shutil.which("redis-server")
    if found is None:
        raise click.ClickException("no redis-server on the PATH (Debian: apt-get install redis-server)")
    return Path(found)


def _roles(only: str | None) -> Sequence[str]:
    return [role for role in ROLES if role.startswith(only or "")]


def _run(scene: Scene, *, keep: bool) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix=f"rollq-chaos-{scene.seed}-"))
    outcome = run_chaos(scene, folder)
    for violation in outcome.violations:
        click.echo(f"seed {scene.seed}: {violation.invariant}: {violation.message}")
    if outcome.violations or keep:
        click.echo(f"seed {scene.seed}: histories and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return outcome


def _finish(outcomes: Sequence[Outcome]) -> None:
    columns = ["seed", "fsync", "faults", "kills", "stops", "zombies", "partitions", "copies", "steps"]
    table = Table(*columns, *INVARIANTS, "other")
    for outcome in outcomes:
        table.add_row(*map(str, [outcome.scene.seed, outcome.scene.fsync, *_numbers(outcome)]))
    totals = [sum(column) for column in zip(*map(_numbers, outcomes), strict=True)]
    table.add_section()
    table.add_row("all", "", *map(str, totals))
    Console().print(table)
    sys.exit(any(outcome.violations for outcome in outcomes))


def _numbers(outcome: Outcome) -> list[int]:
    done, found = outcome.done, Counter(violation.invariant for violation in outcome.violations)
    named = [sum(found[invariant] for invariant in invariants) for invariants in INVARIANTS.values()]
    kinds = [done[kind] for kind in ("kill", "stop", "zombie", "partition")]
    return [done.total(), *kinds, outcome.copies, outcome.steps, *named, found.total() - sum(named)]


if __name__ == "__main__":
    main()
