"""`rollq runs recover`: continues a run from given weights after its checkpoint is lost."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import settings_file

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer


@click.command(short_help="Let a run continue from weights, without its checkpoint.")
@settings_file
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Folder with the weights: an older checkpoint, or a published version.",
)
@click.option(
    "--step",
    type=click.IntRange(0),
    help="Train step of the weights; default: the step recorded for them, or else the last one trained.",
)
@click.option("--relabel", is_flag=True, help="Accept --step even though another step is recorded for the weights.")
@click.option("--dry-run", is_flag=True, help="Show what would be trained again, and write nothing.")
def recover(file: Path, weights: Path, step: int | None, relabel: bool, dry_run: bool) -> None:
    """Make a checkpoint from weights, so that `rollq train` continues a run whose checkpoint was lost.

    FILE is rollq.toml. Later steps whose batches are still in the buffer are trained again, on the same groups; the
    optimizer starts over. The step of a checkpoint is in its trainer.json; the run knows the step of published weights
    until a checkpoint covers them. If neither has the step, give --step: without it, the weights count as those after
    the last trained step, although they may be older. A --step that differs from the recorded one is refused without
    --relabel.

    \b
    Example:
      rollq runs recover rollq.toml --weights backups/step-30
      rollq runs recover rollq.toml --weights trainer/weights/weights-sums-0f6c5a1d2b3e4f50
      rollq runs recover rollq.toml --weights model-of-last-week --step 41
    """
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.file import load_settings
    from rollq.consumer.trainer.checkpoints import adopt_weights
    from rollq.consumer.trainer.output_lock import locked

    settings = load_settings(file)
    trainer = settings.trainer
    if trainer is None:
        raise ConfigError(f"{file}: there is no table [trainer], so no trainer of rollq reads a checkpoint")
    _check_model(weights, trainer.model)
    with RunLocation.from_settings(settings).without_payloads() as buffer:
        oldest, last = _steps(buffer)
        recorded = _recorded(buffer, weights)
    wanted = _chosen(step, recorded, (oldest, last), settings.run, relabel=relabel)
    if step is None:
        click.echo(
            f"{recorded.by} says that the weights are from step {recorded.step}"
            if recorded
            else f"no step is recorded for the weights: they count as the weights of the last step, {last}"
        )
    if not dry_run:
        with locked(trainer.output):
            adopt_weights(trainer.output, wanted, weights, trainer.model)
    click.echo(f"{'would make' if dry_run else 'made'} a checkpoint of step {wanted} in {trainer.output}")
    again = (
        f"steps {wanted + 1} to {last} are trained again, on the batches that they had"
        if wanted < last
        else ("no step is trained again")
    )
    click.echo(f"`rollq train` continues with step {wanted + 1}: {again}; the optimizer starts over")


class _Recorded(NamedTuple):
    """The step of some weights, and the source of this information."""

    step: int
    by: str
    is_foreign: bool = False


def _check_model(weights: Path, model: Path) -> None:
    """Raise `ConfigError` if the weights have another model's configuration."""
    from rollq.cli.run_location import fingerprints

    expected = fingerprints(model, None, "trainer.model")
    if (weights / "config.json").exists() and fingerprints(weights, None, "the weights") != expected:
        raise ConfigError(f"--weights {str(weights)!r} belong to a model other than trainer.model = {str(model)!r}")


def _check_step(step: int | None, recorded: _Recorded, run: str) -> None:
    """Raise `ConfigError` if the weights belong to another step or another run."""
    if recorded.is_foreign or step not in (None, recorded.step):
        raise ConfigError(
            f"the weights are those after step {recorded.step}, as {recorded.by} says: to let them count as those "
            f"after another step of run {run!r}, give --step and --relabel"
        )


def _chosen(step: int | None, recorded: _Recorded | None, possible: tuple[int, int], run: str, *, relabel: bool) -> int:
    """The step that weights count as: the given step, or else the recorded step, or else the last of the `possible`
    steps. Raises `ConfigError` if the given step contradicts the recorded step, or the buffer cannot continue after it.
    """
    oldest, last = possible
    if relabel and step is None:
        raise ConfigError("--relabel needs --step, the step that the weights are to count as")
    if recorded is not None and not relabel:
        _check_step(step, recorded, run)
    wanted, source = (last, f"--step {last}") if step is None else (step, f"--step {step}")
    if recorded is not None and step is None:
        wanted, source = recorded.step, f"{recorded.by} says step {recorded.step}"
    if not oldest <= wanted <= last:
        raise ConfigError(
            f"{source}: the buffer can continue after steps {oldest} to {last}; restore a snapshot to go back further, "
            f"or let the weights count as those after step {oldest}: --step {oldest} --relabel"
        )
    return wanted


def _recorded(buffer: "Buffer", weights: Path) -> _Recorded | None:
    """The step recorded for a folder's weights, beside them or by the run that published them."""
    from rollq.buffer.errors import WeightsError
    from rollq.buffer.weights.manifest import describe_folder, digest_of
    from rollq.consumer.trainer.checkpoints import STATE_FILE, recorded_checkpoint

    if (checkpoint := recorded_checkpoint(weights)) is not None:
        of = "" if checkpoint.lineage is None or buffer.knows_lineage(checkpoint.lineage) else " of another run"
        return _Recorded(checkpoint.step, f"{weights / STATE_FILE}{of}", is_foreign=bool(of))
    try:
        digest = digest_of(describe_folder(weights).encode())
    except WeightsError:  # not in the form of published weights
        return None
    version = buffer.published_as(digest)
    return None if version is None else _Recorded(version, f"run {buffer.run!r}, which published them,")


def _steps(buffer: "Buffer") -> tuple[int, int]:
    """The first and the last step after which a trainer can continue. Raises `ConfigError` while a trainer holds the
    run."""
    holder = buffer.holder()
    if holder is not None and holder.left_s > 0 and not holder.has_ended:
        raise ConfigError(f"{holder} holds run {buffer.run!r}: stop it first")
    clocks = buffer.clocks(buffer.train_tasks()).values()
    if not clocks:
        raise ConfigError(f"run {buffer.run!r} has no tasks yet: there is nothing to recover")
    return max(clock.history for clock in clocks), min(clock.committed for clock in clocks)
