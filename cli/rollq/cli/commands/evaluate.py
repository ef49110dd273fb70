"""`rollq evaluate`: runs a settings file's evaluations with saved weights."""

from pathlib import Path

import click

from rollq.cli.options import file_and


@click.command()
@file_and(needs_file=True, more="[FOLDER]...")
@click.option(
    "--weights",
    "first",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER...",
    help="Folders of weights: checkpoints of the trainer, or models of Hugging Face.",
)
@click.option("--workers", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of worker processes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the results over the weights, as PNG.")
def evaluate(
    file: Path, first: Path, more: tuple[str, ...], workers: int, as_json: bool, plot_file: Path | None
) -> None:
    """Run the evaluations of FILE with saved weights, without training.

    A producer and workers run on this machine, in a run with another name that is deleted at the end, or, if the
    command is killed, by the next evaluation of the same output. The training run may continue, unless its engines are
    HTTP servers, which would get these weights. If no server answers at the URL in FILE, the command starts another.
    Logs are in the folder evaluation beside the output of [trainer].

    \b
    Example:
      rollq evaluate rollq.toml --weights out/step-000010 out/step-000020
      rollq evaluate rollq.toml --weights out/step-* --workers 4 --json
    """
    import orjson

    from rollq.buffer.errors import ConfigError
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.file import load_settings
    from rollq.cli.signals import interrupt_once
    from rollq.cli.up.evaluation import Evaluated, Evaluation, check_plot, check_weights, plot, tables
    from rollq.cli.up.roles import check_roles
    from rollq.cli.up.run import alone_in, grace_s, run_folder, source_of_run_folder
    from rollq.cli.up.server import server_beside

    settings = load_settings(file)
    if not settings.evaluations:
        raise ConfigError(f"{file}: there is nothing to evaluate: add a table [evaluations.NAME]")
    folders = [first, *map(Path, more)]
    check_weights(folders)
    if plot_file:
        check_plot(plot_file)
    folder = run_folder(settings, file) / "evaluation"
    results = list[Evaluated]()

    def show() -> None:
        if as_json:
            click.echo(orjson.dumps([{"weights": str(result.folder), "metrics": result.metrics} for result in results]))
        elif results:
            click.echo("\n".join(tables(results, list(settings.evaluations))))
        if plot_file and results:
            plot(results, list(settings.evaluations), plot_file)

    with interrupt_once(grace_s(settings) + 10, again_kills=True):
        try:
            check_roles(settings, file)
            with (
                alone_in(folder, source_of_run_folder(settings), "evaluate"),
                server_beside(RunLocation.from_settings(settings), folder / "server") as url,
            ):
                for result in Evaluation(settings, file, workers, folder, url).run(folders):
                    results.append(result)
        except KeyboardInterrupt:
            click.echo(f"stopped after {len(results)} of {len(folders)} folders", err=True)
            raise SystemExit(130) from None
        finally:
            show()
