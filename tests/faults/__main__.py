"""`python -m faults`: the long versions of the fault suite. Each prints a table, and fails on a violation."""

import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import click
import redis
from tqdm import tqdm

from faults.chaos import RANK_NAMES, Outcome, Scene, run_chaos, worker_names
from faults.crash_points import Coverage, crash_everywhere
from faults.findings import Finding
from faults.fuzz_decoders import fuzz_decoders
from faults.fuzz_functions import Fuzzer
from faults.goodput import make_goodput_plan, measure
from faults.payloads import in_bucket, in_server_folder
from faults.plain_queues import KINDS, drill
from faults.plan import CALM, make_failover_plan, make_recovery_plan
from faults.poison import run_poison
from faults.processes import LEASE_S, LENDING, LIGHT
from faults.races import trainer_races, zombie_puts
from faults.random_runs import broken_promise
from faults.recovery import percentile, trainer_recoveries_s, worker_recoveries_s
from faults.scenarios import scenarios
from faults.seeded_bugs import BUGS, is_noticed
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.monitor.text.tables import aligned
from support.buffer_machine import run_machine
from support.forks import FORKS, ROLES

INVARIANTS = {
    "lost": ("I1", "I2", "I6"),
    "twice": ("I3",),
    "too old": ("I5",),
    "ranks": ("ranks", "replay"),
    "made twice": ("lent",),
    "deleted": ("deleted",),
}
"""Columns of the table, and the invariants that they count violations of; `other` counts all others."""
FAULTS_PER_RUN = 100
COUNTED = ("kill", "stop", "zombie", "partition", "forget", "evict", "order", "rules", "delete")
VERDICTS = ("refused", "accepted", "crash", "wrongly accepted", "half done", "hangs")
SECONDS_PER_KILL = 3.0
CALLS_SHARE = 20
GOLDEN_CALLS = 420
"""About how many calls of different functions the moves of the golden run make, before and after each move."""
SEQUENCES_PER_PART = 100
MOST_SHOWN = 4
"""Findings shown of each target."""

Row = list[str | int]
PLACES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "folder": nullcontext, "bucket": in_bucket, "server-folder": in_server_folder
}  # fmt: skip
Item = TypeVar("Item")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """Break rollq on purpose, and check its promises."""
    FORKS.set_forkserver_preload(["faults.processes", *ROLES])


@main.command()
@click.option("--seed", default=1, help="Seed of the first run; each run has the next one.")
@click.option("--faults", default=1000, help=f"Faults in all, at most {FAULTS_PER_RUN} in a run.")
@click.option("--gap", default=0.4, help="Mean seconds between two faults.")
@click.option("--fsync", type=click.Choice(["everysec", "always"]), default="everysec")
@click.option("--server", type=click.Choice(["valkey", "redis"]), default="valkey")
@click.option("--cluster", is_flag=True, help="The buffer is on a cluster, whose nodes break.")
@click.option(
    "--payloads", type=click.Choice(list(PLACES)), default="folder", help="Where the largest payloads are kept."
)
@click.option("--lending", is_flag=True, help="Groups are larger than a worker's places, and samples are lent.")
@click.option("--only", default="", help="Break only this: server, producer, importer, worker, trainer, operator.")
@click.option("--keep", is_flag=True, help="Keep the folder of every run, not only of those with violations.")
def chaos(
    seed: int, faults: int, gap: float, fsync: str, server: str, cluster: bool, payloads: str, lending: bool,
    only: str, keep: bool,
) -> None:  # fmt: skip
    """Kill, stop and cut off roles and server at random while a run trains."""
    load = LENDING if lending else LIGHT
    scene = partial(Scene, fsync=fsync, binary=_binary(server), only=only, gap_s=gap, cluster=cluster, load=load)
    scenes = [
        scene(seed + index, min(FAULTS_PER_RUN, faults - at))
        for index, at in enumerate(range(0, faults, FAULTS_PER_RUN))
    ]
    with PLACES[payloads]():
        outcomes = [_run(scene, keep=keep) for scene in _progress(scenes, "run")]
    rows: list[Row] = [[str(outcome.scene.seed), outcome.scene.fsync, *_numbers(outcome)] for outcome in outcomes]
    columns = (
        "seed",
        "fsync",
        "faults",
        "kills",
        "stops",
        "zombies",
        "partitions",
        "flushes",
        "evictions",
        "orders",
        "resizes",
        "deletions",
        "copies",
        "lent",
        "steps",
    )
    _print([*columns, *INVARIANTS, "other"], rows)
    sys.exit(any(outcome.violations for outcome in outcomes))


def _binary(server: str) -> Path | None:
    if server == "valkey":
        return None
    found = shutil.which("redis-server")
    if found is None:
        raise click.ClickException("no redis-server on the PATH (Debian: apt-get install redis-server)")
    return Path(found)


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


def _numbers(outcome: Outcome) -> list[int]:
    kinds = [outcome.done[kind] for kind in COUNTED]
    return [outcome.done.total(), *kinds, outcome.copies, outcome.lent, outcome.steps, *_violations(outcome)]


def _violations(outcome: Outcome) -> list[int]:
    """How many violations there were of each group of `INVARIANTS`, and others."""
    found = Counter(violation.invariant for violation in outcome.violations)
    named = [sum(found[invariant] for invariant in invariants) for invariants in INVARIANTS.values()]
    return [*named, found.total() - sum(named)]


@main.command()
@click.option("--kills", default=50, help="SIGKILLs of workers, and as many of the trainer's rank 0.")
def recovery(kills: int) -> None:
    """Measure how long it takes until the work of a killed worker or trainer is in other hands."""
    rows: list[Row] = []
    for name, roles, recoveries_s in (
        ("worker", worker_names(3), worker_recoveries_s),
        ("trainer", RANK_NAMES[:1], trainer_recoveries_s),
    ):
        plan = make_recovery_plan(kills, roles, every_s=SECONDS_PER_KILL)
        outcome = _run(Scene(seed=0, faults=0, odds=CALM, plan=plan), keep=False)
        found = recoveries_s(outcome.events)
        times = [f"{percentile(found, percent):.3f}" for percent in (50, 99, 100)]
        rows.append([name, kills, len(found), *times, len(outcome.violations)])
    _print(["role", "kills", "recoveries", "median s", "p99 s", "longest s", "violations"], rows)
    click.echo(f"leases of {LEASE_S:g} s")


@main.command()
@click.option("--seconds", default=240, help="Length of each of the three runs.")
@click.option("--max-staleness", default=2, help="Of the run.")
@click.option("--batch-groups", default=80, help="Groups of a batch; the workers make 80 groups at a time.")
def goodput(seconds: int, max_staleness: int, batch_groups: int) -> None:
    """Measure trained tokens per second while a tenth of the workers is killed in every step's time."""
    with tempfile.TemporaryDirectory() as folder:
        measured = partial(measure, Path(folder), seconds, max_staleness, batch_groups)
        calm = measured("without faults", [])
        plan = make_goodput_plan(calm.step_s, seconds)
        found = [calm, measured("workers", [fault for fault in plan if fault.target.startswith("worker")])]
        found.append(measured("all roles", plan))
    rows: list[Row] = [
        [
            run.name, run.outcome.done["kill"], run.steps, run.tokens, f"{run.step_s:.1f}", f"{run.tokens_per_s:.0f}",
            f"{run.tokens_per_s / calm.tokens_per_s:.1%}",
        ]
        for run in found
    ]  # fmt: skip
    _print(["killed", "kills", "steps", "tokens", "s per step", "tokens/s", "goodput"], rows)
    violations = [violation for run in found for violation in run.outcome.violations]
    for violation in violations:
        click.echo(f"{violation.invariant}: {violation.message}")
    sys.exit(bool(violations))


@main.command()
@click.option("--times", default=20, help="Failovers in each of the two runs.")
@click.option("--behind", default=0.5, help="Seconds by which the replica of the second run is behind.")
def failover(times: int, behind: float) -> None:
    """Count what failovers lose, to a replica that is cut off right before, and to one that is behind."""
    rows: list[Row] = []
    for behind_s in (0.0, behind):
        plan = make_failover_plan(times, every_s=SECONDS_PER_KILL + behind_s, behind_s=behind_s)
        outcome = _run(Scene(seed=0, faults=0, odds=CALM, plan=plan, modes=("replay",)), keep=False)
        rows.append([f"{behind_s:g}", times, outcome.steps, *_violations(outcome)])
    _print(["behind s", "failovers", "steps", *INVARIANTS, "other"], rows)


@main.command()
@click.option("--poisons", default=(0, 1, 2), multiple=True, help="Poisonous prompts in a run; may be repeated.")
def poison(poisons: Sequence[int]) -> None:
    """Count how many workers a prompt kills before it is quarantined, and what becomes of the other prompts."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        for number in poisons:
            found = run_poison(server, Path(folder) / str(number), number)
            numbers = [found.deaths, found.quarantined, found.innocents_failed, found.completed]
            rows.append([str(number), *numbers, f"{found.groups_per_s:.1f}"])
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
    _print(["poisons", "deaths", "quarantined", "innocents failed", "completed", "groups/s"], rows)


@main.command()
@click.option("--puts", default=10_000)
@click.option("--trainers", default=1_000)
def races(puts: int, trainers: int) -> None:
    """Have late workers put results, and two trainers at a time take the run."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        outcomes = zombie_puts(server.url, puts)
        fair = trainer_races(server.url, trainers)
    refused = outcomes[PutOutcome.REFUSED]
    click.echo(f"late puts: {outcomes.total()}, refused: {refused}")
    click.echo(f"races of two trainers: {trainers}, with one winner: {fair}")
    sys.exit(refused != outcomes.total() or fair != trainers)


@main.command()
@click.option("--every", default=1, help="Crash only at every n-th call.")
@click.option("--first", default=0, help="Number of the first of these calls.")
@click.option("--only", default="", help="Only scenarios whose name begins with this.")
def crashpoints(every: int, first: int, only: str) -> None:
    """Kill every role before and after each of its Redis calls."""
    chosen = [scenario for scenario in scenarios() if scenario.name.startswith(only)]
    coverages = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        for number, scenario in enumerate(chosen):
            calls = _progress(count(first, every), "call", scenario.name)
            coverages.append(crash_everywhere(scenario, server, Path(folder) / str(number), calls))
            _print_failures(coverages[-1])
    rows: list[Row] = [
        [coverage.scenario, coverage.calls, len(coverage.commands), len(coverage.points), len(coverage.failures)]
        for coverage in coverages
    ]
    _print(["role", "calls", "kinds of calls", "crash points", "violations"], rows)
    sys.exit(any(coverage.failures for coverage in coverages))


def _print_failures(coverage: Coverage) -> None:
    for point in coverage.failures:
        for problem in point.problems:
            click.echo(f"{point.scenario}, {point.side} call {point.number} ({point.command}): {problem}")


@main.command()
@click.option("--seed", default=1, help="Seed of all inputs.")
@click.option("--inputs", default=1_020_000, help="Inputs in all; one in twenty is a call of a Redis function.")
def fuzz(seed: int, inputs: int) -> None:
    """Feed hostile inputs to every decoder and to every Redis function."""
    calls = inputs // CALLS_SHARE
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        tallies = list(_progress(fuzz_decoders(seed, inputs - calls, Path(folder)), "decoder"))
        tallies += Fuzzer(server, seed).run(Path(folder), max(1, calls // GOLDEN_CALLS))
    for tally in tallies:
        for finding in _kinds(tally.findings)[:MOST_SHOWN]:
            click.echo(f"{finding.target}: {finding.verdict}: {finding.message:.200}: {finding.given!r:.400}")
    rows: list[Row] = [[tally.target, *(tally.verdicts[verdict] for verdict in VERDICTS)] for tally in tallies]
    _print(["target", *VERDICTS], rows)
    click.echo(f"{sum(tally.verdicts.total() for tally in tallies)} inputs, seed {seed}")
    sys.exit(any(tally.findings for tally in tallies))


def _kinds(findings: Sequence[Finding]) -> Sequence[Finding]:
    """One finding of each kind: with the same verdict and beginning of the message."""
    return list({(finding.verdict, finding.message[:24]): finding for finding in findings}.values())


@main.command()
@click.option("--seed", default=1, help="Seed of all sequences.")
@click.option("--sequences", default=2500, help="Sequences of up to 50 moves.")
def model(seed: int, sequences: int) -> None:
    """Compare the buffer with a plain model, move by move, with late copies and replaced trainers."""
    moves = 0
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        for part in _progress(range(0, sequences, SEQUENCES_PER_PART), "part"):
            examples = min(SEQUENCES_PER_PART, sequences - part)
            moves += run_machine(server.url, examples=examples, seed=seed + part)
    click.echo(f"{moves} moves in {sequences} sequences, seed {seed}: no difference")


@main.command()
@click.option("--seed", default=1, help="Seed of the first run; each run has the next one.")
@click.option("--count", default=300, help="How many runs.")
def runs(seed: int, count: int) -> None:
    """Play random runs: launches that die between two calls, rewinds, releases, late tasks, snapshots, insertions,
    an operator, lost functions, deleted runs."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        stories = [broken_promise(at, server.url) for at in _progress(range(seed, seed + count), "run")]
    failures = [story for story in stories if story]
    click.echo("\n".join([*failures, f"{count} runs from seed {seed}: {len(failures)} broke a promise"]))
    sys.exit(bool(failures))


@main.command()
def bugs() -> None:
    """Put bugs into the functions, and see whether the suite notices them."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, bug in enumerate(_progress(BUGS, "bug")):
            (where := Path(folder) / str(number)).mkdir()
            found.append(is_noticed(bug, where))
    rows: list[Row] = [[bug.name, "yes" if noticed else "no"] for bug, noticed in zip(BUGS, found, strict=True)]
    _print(["bug", "noticed"], rows)
    sys.exit(not all(found))


@main.command()
@click.option("--seed", default=1)
def plain(seed: int) -> None:
    """The drill without rollq: with RQ's own worker, and with sorted sets and ZPOPMIN."""
    rows: list[Row] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(list(drill(kind, seed, Path(folder))))
    _print(["queue", "kills", "trained", "lost", "twice"], rows)


def _progress(items: Iterable[Item], unit: str, name: str = "") -> Iterable[Item]:
    """The items, behind a progress bar on a terminal."""
    return tqdm(items, name, unit=unit, disable=None)


def _print(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """A table whose last line adds up its numbers."""
    totals = [sum(cell for cell in cells if isinstance(cell, int)) for cells in zip(*rows, strict=True)]
    total = ["" if isinstance(cell, str) else number for cell, number in zip(rows[0], totals, strict=True)]
    table = [columns, *rows, ["all", *total[1:]]]
    click.echo("\n".join(aligned([[str(cell) for cell in row] for row in table])))


if __name__ == "__main__":
    main()
