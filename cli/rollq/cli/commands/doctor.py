"""`rollq doctor`: checks a run's servers and folders for current and future problems."""

import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.model import RollqSettings
    from rollq.cli.settings.task_settings import TaskSettings
    from rollq.monitor.doctor.examine import Weights
    from rollq.monitor.doctor.findings import Finding
    from rollq.monitor.doctor.sizing import TaskSize


@click.command()
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option(
    "--clean", is_flag=True, help="Instead, delete the functions of other releases that no role uses, as the operator."
)
@click.option(
    "--load-functions",
    is_flag=True,
    help="Instead, load the functions of this release, as the operator, if no other role may.",
)
@click.pass_context
def doctor(
    context: click.Context,
    file: Path | None,
    url: str | None,
    run_name: str | None,
    as_json: bool,
    clean: bool,
    load_functions: bool,
) -> None:
    """Check a run's servers and folders for current and future problems, and print the commands that fix them.

    Changes nothing without --clean or --load-functions, except that it writes and removes a test object where large
    payloads are. With FILE, it also compares the server's memory with the settings and checks the folder of the
    weights.

    \b
    Exit status, for health checks:
      0  all is well; notes need nothing
      1 an error: rollq does not work, or may lose or expose the run at any moment
      2  wrong settings or arguments
      3 a warning: it works now, but will cause a problem later

    \b
    Example:
      rollq doctor rollq.toml
      rollq doctor --url redis://127.0.0.1:6379/0 --run sums --json
      ROLLQ_REDIS_USER=sums-operator ROLLQ_REDIS_PASSWORD_FILE=passwords/operator rollq doctor --load-functions
    """
    from rollq.cli.run_location import find_run
    from rollq.monitor.doctor import findings

    if clean + load_functions + as_json > 1:
        raise ConfigError("--clean and --load-functions make no report: give one of them, without --json")
    if clean or load_functions:
        (_clean if clean else _load)(find_run(file, url, run_name))
        return
    report = _examine(find_run(file, url, run_name))
    click.echo(findings.as_json(report) if as_json else findings.as_text(report))
    context.exit(findings.EXIT_STATUS[findings.worst_level(report)])


def _clean(location: "RunLocation") -> None:
    from rollq.buffer.store.servers import connect_servers
    from rollq.monitor.doctor.old_functions import delete_unused

    with closing(connect_servers(location.buffer_url, location.password)) as servers:
        deleted = delete_unused(servers)
    for name in deleted:
        click.echo(f"deleted the functions {name}")
    if not deleted:
        click.echo("found no unused functions")


def _load(location: "RunLocation") -> None:
    from rollq.buffer.store.library import digest, library_name
    from rollq.buffer.store.redis_functions import load_library

    with location.without_payloads() as buffer:
        load_library(buffer.servers)
        click.echo(f"the server has the functions {library_name()}, of the release with digest {digest()}")


def _examine(location: "RunLocation") -> "dict[str, list[Finding]]":
    from rollq.buffer.store.connection import open_client
    from rollq.buffer.store.redis_url import address
    from rollq.buffer.store.servers import open_servers
    from rollq.cli.settings.file import load_settings
    from rollq.monitor.doctor.checks import BUFFER_CHECKS, CLUSTER_CHECKS, QUEUE_CHECKS
    from rollq.monitor.doctor.examine import (
        examine_codec,
        examine_payloads,
        examine_run,
        examine_server,
        examine_sizing,
        examine_weights,
        read_sizing,
    )
    from rollq.monitor.doctor.facts import SETTINGS

    file = location.file
    settings = load_settings(file) if file else None
    planned = planned_tasks(settings) if settings else None
    weights = weights_of(settings) if settings else None
    report = {}
    with closing(open_servers(location.buffer_url, location.password)) as servers:
        checks = CLUSTER_CHECKS if servers.spread else BUFFER_CHECKS
        sizing = read_sizing(servers, location.run, planned)
        for client in servers.primaries():
            facts, report[address(client)] = examine_server(client, checks, settings=file or SETTINGS)
            if facts:
                sized = examine_sizing(servers, client, location.run, facts, sizing, weights)
                report[address(client)].append(sized)
        report[address(servers.primaries()[0])] += examine_run(servers, location.run, is_named=file is None)
        here = list(examine_payloads(servers, location.run, location.payloads, sizing))
    if location.queue_url != location.buffer_url:
        with open_client(location.queue_url, location.password) as client:
            _, report[f"{address(client)}, the queue"] = examine_server(client, QUEUE_CHECKS, settings=file or SETTINGS)
    here += [*(examine_weights(weights) if weights else ()), *examine_codec()]
    return {**report, "this machine": here} if here else report


def planned_tasks(settings: "RollqSettings") -> "dict[str, TaskSize]":
    """The size of each task at the limits that the settings allow."""
    return {name: _planned(settings, task) for name, task in settings.train_tasks().items()}


def _planned(settings: "RollqSettings", task: "TaskSettings") -> "TaskSize":
    from rollq.buffer.payloads.router import MIN_BYTES
    from rollq.buffer.store.redis_url import node_urls
    from rollq.monitor.doctor.sizing import TaskSize, kept_bytes, largest_payload, placed

    every = settings.trainer.checkpoint_every if settings.trainer else task.max_uncheckpointed_steps
    top_ks = [settings.worker.pools[name].top_k for name in task.scorers if name in settings.worker.pools]
    size = TaskSize(
        task,
        largest_payload(task.group_size, task.max_prompt_tokens, task.max_tokens, top_ks),
        checkpoint_steps=every,
        surplus_groups=math.ceil(settings.producer.over_sample * task.batch_groups),
        audited_groups=task.audit_groups if task.filters else 0,
    )
    return placed(
        size,
        kept_bytes(task.group_size, task.max_prompt_tokens),
        min_outside=(settings.payloads.min_bytes or MIN_BYTES) if settings.payloads.url else None,
        spread=len(node_urls(settings.redis.buffer_url)) > 1,
    )


def weights_of(settings: "RollqSettings") -> "Weights | None":
    """How the reference trainer sends weights; None without one, with an object store, or without files."""
    from rollq.monitor.doctor.examine import Weights

    trainer = settings.trainer
    if trainer is None or trainer.transport in ("s3", "nccl"):
        return None
    folder = trainer.consumer().weights_dir if trainer.transport == "path" else None
    return Weights(folder, _size(trainer.model.glob("*.safetensors")), trainer.keep_versions)


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
