"""`rollq recover`: a run whose trainer has lost its checkpoint continues from weights that are given."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Folder with the weights: an older checkpoint, or those of a published version.",
)
@click.option("--step", type=click.IntRange(0), help="Train step after which they are; default: the last one trained.")
@click.option("--dry-run", is_flag=True, help="Say what would be trained again, and write nothing.")
def recover(file: Path, weights: Path, step: int | None, dry_run: bool) -> None:
    """Make a checkpoint from weights, so that `rollq train` continues a run whose checkpoint was lost.

    FILE is rollq.toml. The steps after --step whose batches are still in the buffer are trained again, on the same
    groups; the optimizer begins anew. Without --step, nothing is trained again: the weights then count as those after
    the last trained step, although they may be older.

    \b
    Example:
      rollq recover rollq.toml --weights trainer/weights/00000041
      rollq recover rollq.toml --weights backups/step-30 --step 30
    """
    from rollq.cli.run_location import RunLocation, fingerprints
    from rollq.cli.settings_file import load_settings
    from rollq.consumer.checkpoints import adopt_weights
    from rollq.consumer.output_lock import locked

    settings = load_settings(file)
    trainer = settings.trainer
    if trainer is None:
        raise ConfigError(f"{file}: there is no table [trainer], so no trainer of rollq reads a checkpoint")
    if (weights / "config.json").exists() and fingerprints(weights, None) != fingerprints(trainer.model, None):
        raise ConfigError(
            f"--weights {str(weights)!r} are of another model than trainer.model = {str(trainer.model)!r}"
        )
    with RunLocation.from_settings(settings).without_payloads() as buffer:
        oldest, last = _steps(buffer)
    wanted = last if step is None else step
    if not oldest <= wanted <= last:
        raise ConfigError(
            f"--step {wanted}: the buffer can continue after steps {oldest} to {last}; restore a snapshot to go back "
            "further"
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
    click.echo(f"`rollq train` continues with step {wanted + 1}: {again}; the optimizer begins anew")


def _steps(buffer: "Buffer") -> tuple[int, int]:
    """The first and the last step after which a trainer can continue. Raises `ConfigError` while one holds the run."""
    holder = buffer.holder()
    if holder is not None and holder.left_s > 0 and not holder.has_ended:
        raise ConfigError(f"{holder} holds run {buffer.run!r}: stop it first")
    clocks = buffer.clocks(buffer.train_tasks()).values()
    if not clocks:
        raise ConfigError(f"run {buffer.run!r} has no tasks yet: there is nothing to recover")
    return max(clock.history for clock in clocks), min(clock.committed for clock in clocks)
