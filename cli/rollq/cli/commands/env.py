"""`rollq env`: lists environments, shows the keys that an environment sets, writes its rows, and checks and tries
it."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.common.counting import count
from rollq.buffer.errors import ConfigError
from rollq.cli.options import file_and

if TYPE_CHECKING:
    from rollq.environments.expansion import Environment

CHECKED_ROWS = 200
TRIED_ROWS = 50
TRIED_SAMPLES = 4
SHOWN_ROWS = 3

OPTIONS = click.option(
    "--option", "-o", "options", multiple=True, metavar="KEY=VALUE", help="An entry of env_options; may be repeated."
)
SPLIT = click.option("--split", default="train", show_default=True, help="The rows, as env_split names them.")


@click.group()
def env() -> None:
    """Work with environments: prompts with graders from packages, servers and folders, named as KIND:NAME.

    \b
    Example:
      rollq env list
      rollq env check reasoning-gym:chain_sum
    """


@env.command("list")
@click.argument("kind", required=False)
def list_kinds(kind: str | None) -> None:
    """List the kinds of environments, with the package version that each needs; with KIND, list its names."""
    from rollq.environments.kinds import kind_named, kind_names

    if kind is not None:
        found = kind_named(kind)
        if not found.installed():
            raise ConfigError(f"kind {kind!r} needs a package: {found.install()}")
        names = list(found.names())
        click.echo("\n".join(names) if names else f"{kind} has no list of names: give one as {kind}:NAME")
        return
    for name in kind_names():
        known = kind_named(name)
        click.echo(f"{name:16}{known.installed() or f'not installed: {known.install()}'}")


@env.command()
@file_and(task="[TASK]", needs_file=True)
def show(file: Path, task: str | None) -> None:
    """Print the ordinary keys that the env of a task or an evaluation sets.

    TASK may be left out if there is only one.
    """
    from rollq.cli.settings.environment_rows import toml_of
    from rollq.cli.settings.file import read_toml
    from rollq.cli.settings.task_tables import flattened
    from rollq.environments.expansion import expanded

    flat, problems = flattened(read_toml(file))
    found = expanded(flat, file.absolute().parent)
    if problems or found.problems:
        raise ConfigError("\n  ".join([f"{file}:", *problems, *found.problems]))
    shown = [one for one in _tables_with_env(found.data) if task in (None, one[1])]
    if not shown:
        raise ConfigError(f"no task or evaluation{'' if task is None else f' {task!r}'} of {file} has env")
    for root, name, table in shown:
        click.echo(toml_of(root, name, table))


def _tables_with_env(data: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The root, name and content of each table that sets env."""
    for root in ("tasks", "evaluations"):
        tables = data.get(root)
        for name, table in tables.items() if isinstance(tables, dict) else ():
            if isinstance(table, dict) and table.get("env"):
                yield root, name, table


@env.command()
@click.argument("environment", metavar="ENV")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@OPTIONS
@SPLIT
@click.option("--rows", type=click.IntRange(1), default=5_000, show_default=True, help="Most rows.")
def export(environment: str, file: Path, options: Sequence[str], split: str, rows: int) -> None:
    """Write the rows of ENV, a kind and a name, to FILE as JSON lines.

    \b
    Example:
      rollq env export reasoning-gym:chain_sum sums.jsonl --rows 200 -o max_terms=2
    """
    from rollq.environments.rows import write_rows

    if file.exists():
        raise ConfigError(f"{file} exists already: name another file")
    written = write_rows(_environment(environment, options, split, rows), file.absolute(), file.absolute().parent)
    click.echo(f"wrote {written} to {file}")


@env.command()
@click.argument("environment", metavar="ENV")
@OPTIONS
@SPLIT
@click.option("--rows", type=click.IntRange(1), default=CHECKED_ROWS, show_default=True, help="Rows to check.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(environment: str, options: Sequence[str], split: str, rows: int, as_json: bool) -> None:
    """Check ENV, a kind and a name, without a model: its rows, its grader, its episodes.

    The exit status is 1 if ENV is not fit for training.

    \b
    Example:
      rollq env check reasoning-gym:countdown
    """
    from rollq.buffer.common import exact_json
    from rollq.environments.check import check as findings_of
    from rollq.environments.kinds import Level

    def tell(text: str) -> None:
        click.echo(f"{environment}: {text}", err=True)

    found = list(findings_of(_environment(environment, options, split, rows, rows_needed=False), rows, tell))
    wrong = sum(one.level is Level.ERROR for one in found)
    if as_json:
        listed = [{"level": one.level, "text": one.text, "row": one.row} for one in found]
        click.echo(exact_json.dumps({"env": environment, "findings": listed}))
    else:
        for one in found:
            click.echo(f"{one.level:8}{one.text}" + ("" if one.row is None else f" (row {one.row})"))
        click.echo("\n" + (f"{count(wrong, 'error')}: fix that before you train on it" if wrong else "no error"))
    if wrong:
        raise SystemExit(1)


@env.command("try")
@click.argument("environment", metavar="ENV")
@OPTIONS
@SPLIT
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Folder of a model."
)
@click.option("--prompts", type=click.IntRange(1), default=TRIED_ROWS, show_default=True, help="Rows to sample.")
@click.option("--samples", type=click.IntRange(2), default=TRIED_SAMPLES, show_default=True, help="Samples of each.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest sample, in tokens.")
def try_environment(
    environment: str, options: Sequence[str], split: str, model: Path, prompts: int, samples: int, max_tokens: int
) -> None:
    """Sample rows of ENV, a kind and a name, with a model: rewards, and groups whose rewards differ.

    \b
    Example:
      rollq env try reasoning-gym:chain_sum --model Qwen2.5-0.5B-Instruct
    """
    import tempfile

    from rollq.cli.commands.try_ import first_rows, rows_report, samples_report, try_all
    from rollq.cli.settings.model import RollqSettings
    from rollq.environments.expansion import expanded
    from rollq.environments.rows import write_rows
    from rollq.producer.prompts import PromptFile

    opened = _environment(environment, options, split, prompts)
    with tempfile.TemporaryDirectory(prefix="rollq-env-") as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(opened, rows, Path(folder))
        table = {"env": environment, "env_options": dict(opened.options), "env_split": split, "prompts": rows}
        chat = {"chat": (model / "chat_template.jinja").exists()}
        task = {**table, **chat, "batch_groups": 1, "group_size": samples, "max_tokens": max_tokens}
        data = expanded({"run": "try", "tasks": {"env": task}}, Path.cwd()).data
        worker = {"engine": "transformers", "options": {"model": model}}
        settings = RollqSettings.model_validate({**data, "worker": worker})
        rules = settings.tasks["env"]
        with ExitStack() as stack:
            file = stack.enter_context(PromptFile(rules, None))
            tried, problems = first_rows(file, prompts)
            asyncio.run(try_all("env", rules, settings.worker, tried, None, True, settings.seed))
    for line in [*rows_report(tried[:SHOWN_ROWS]), *samples_report(tried)]:
        click.echo(line)
    for problem in problems:
        click.echo(problem, err=True)


def _environment(env: str, options: Sequence[str], split: str, rows: int, *, rows_needed: bool = True) -> "Environment":
    from rollq.environments.expansion import Environment

    sys.path.append(str(Path.cwd()))  # classes beside the settings file
    environment = Environment(env, _options(options), split, rows, folder=Path.cwd())
    if rows_needed and not environment.makes_rows:
        raise ConfigError(f'"{env}" has no rows: its prompts are yours; `rollq try` tries them')
    environment.installed_identity()
    return environment


def _options(given: Sequence[str]) -> Mapping[str, Any]:
    """The options, with values as in TOML; other values are strings. Raises `ConfigError`."""
    import tomllib

    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--option {text!r}: write KEY=VALUE")
        if key == "rows":
            raise ConfigError("--option rows: use --rows, or --prompts of `rollq env try`")
        try:
            options[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[key] = value
    return options
