"""`rollq convert`: makes a `rollq.toml` from another system's settings."""

from pathlib import Path

import click

from rollq.buffer.errors import ConfigError


@click.command("convert")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write to this file, which must not exist; default: print."
)
def convert(file: Path, output: Path | None) -> None:
    """Write a rollq.toml from FILE, an RL config of XTuner v1 (.py) or settings of Trinity-RFT (.yaml).

    FILE is read, not run. Environment variables count as unset. Comments say where the two systems differ, which values
    to replace, and which settings have no equivalent. YAML needs rollq[convert].

    \b
    Example:
      rollq convert rl_grpo_gsm8k.py
      rollq convert gsm8k.yaml -o rollq.toml
    """
    from rollq.cli.settings.migration.convert import converted

    new = converted(file)
    if output is None:
        click.echo(new.text, nl=False)
    else:
        _write(output, new.text)
    click.echo(f"{output or file}: {new.summary}", err=True)
    if new.problem:
        click.echo(f"warning: rollq does not accept the new settings yet: {new.problem}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{str(path)!r} exists: name a new file with --output") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None
