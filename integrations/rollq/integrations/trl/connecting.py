"""Connects a training run's consumer with TRL, on every rank that TRL launches."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollq.consumer import Connection, Consumer, ConsumerSettings
from rollq.consumer.trainer.ranks import Ranks
from rollq.integrations.trl.checkpoints import newest_checkpoint
from rollq.integrations.trl.installed import check_installed

if TYPE_CHECKING:
    from trl import GRPOConfig


def connect(
    place: str | Connection,
    *,
    run: str | None = None,
    model: Path | str,
    args: "GRPOConfig",
    settings: ConsumerSettings | None = None,
    batch: Mapping[str, int] | None = None,
    stop: threading.Event | None = None,
) -> Consumer:
    """Take over a run as its trainer, from the newest complete checkpoint in `args.output_dir`, or from the folder
    `model`.

    `args` gives the rank of this process and the number of ranks. Both replace the values in `settings`, as do a common
    `launch_id` and the reduction `mean`. All ranks call this function, and see the same `output_dir`. Setting `stop`
    ends training after the step under way, with a checkpoint. The other parameters, and their errors, are as in
    `Consumer.connect`. Raises `ConfigError` if TRL is missing or another release is installed.
    """
    check_installed()
    ranks = ranks_of(args)
    found = ranks.lead(lambda: _newest(Path(args.output_dir)))
    step, folder, lineage = found or (0, str(model), None)
    mine = {"rank": ranks.rank, "world_size": ranks.world_size, "launch_id": ranks.launch_id, "reduction": "mean"}
    given = (settings or ConsumerSettings()).model_dump()
    return Consumer.connect(
        place,
        run=run,
        weights=Path(folder),
        batch=batch,
        resume_from=step,
        lineage=lineage,
        settings=ConsumerSettings.model_validate({**given, **mine}),
        stop=stop,
    )


def ranks_of(args: "GRPOConfig") -> Ranks:
    """Join the ranks that TRL launched. `GRPOConfig` has opened torch's default group."""
    ranks = Ranks(args.process_index, args.world_size, args.local_process_index)
    if ranks.are_several:
        ranks.join()
    return ranks


def _newest(output: Path) -> tuple[int, str, str] | None:
    found = newest_checkpoint(output)
    return found and (found.step, str(found.folder), found.lineage)
