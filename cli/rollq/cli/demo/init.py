"""`rollq init`: writes the smallest settings that work, with prompts, a judge and a tiny model."""

import re
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from rollq.buffer.errors import ConfigError

MODEL = "model"
SEED = 1


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
@click.option("--env", metavar="ENV", help="Train on this environment, such as reasoning-gym:chain_sum.")
def init(folder: Path, env: str | None) -> None:
    """Write a rollq.toml to FOLDER, by default the current folder, with prompts, a judge and a tiny model to replace.

    The run trains as it is, without a GPU or network. Existing files are not overwritten.

    \b
    Example:
      rollq init my-run
      rollq init my-run --env reasoning-gym:chain_sum
    """
    from rollq.cli.demo.init_files import ARCHIVE, files

    _check_packages()
    if env is not None:
        _check_environment(env, folder.absolute())
    contents = files(_run_name(folder), env)
    if existing := [name for name in (*contents, MODEL, ARCHIVE) if (folder / name).exists()]:
        raise ConfigError(f"{str(folder)!r} already has {', '.join(existing)}; name another folder")
    _write(folder, contents)
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    click.echo(
        f"wrote {', '.join((*contents, MODEL, ARCHIVE))} to {folder.absolute()}; next:\n"
        f"  {'edit prompts.jsonl and rewards.py, later' if env is None else 'replace'} the model in rollq.toml\n"
        f"  {enter}rollq try   a few prompts with their answers and rewards, without a server\n"
        f"  {enter}rollq up    all roles on this machine, until the trainer has finished"
    )


def _check_packages() -> None:
    missing = [name for name in ("torch", "transformers", "pyarrow") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"`rollq init` needs {', '.join(missing)}: pip install 'rollq[demo]'")


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    from rollq.cli.demo.init_files import ARCHIVE

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content, "utf-8")
        (folder / ARCHIVE).mkdir()
        _make_model(folder / MODEL)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be written: {error}") from None


def _check_environment(env: str, folder: Path) -> None:
    """Raise `ConfigError` for an environment that does not exist, or whose package is not installed."""
    from rollq.environments.expansion import Environment
    from rollq.environments.rows import first_row

    environment = Environment(env, {}, "train", 1, folder=folder)
    if not environment.makes_rows:
        raise ConfigError(f'--env "{env}" has no prompts: run `rollq init` without it, and set env in rollq.toml')
    environment.open().settings()
    environment.installed_identity()
    first_row(environment)


def _run_name(folder: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().name).strip("-")
    return name[:32] or "my-run"


def _make_model(folder: Path) -> None:
    from rollq.cli.demo import tiny_model as tiny  # imports torch, which takes seconds

    tokenizer = tiny.make_tokenizer()
    tiny.save(folder, tiny.make_model(len(tokenizer), SEED), tokenizer)
