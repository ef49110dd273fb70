"""The reference trainer on a recorded run."""

import threading
from contextlib import nullcontext

from rollq.buffer.archive.reader import Archive
from rollq.buffer.errors import ArchiveError, ConfigError
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trackers.trackers import check_packages
from rollq.consumer.trainer.learner import start_learner
from rollq.consumer.trainer.metrics_files import cut
from rollq.consumer.trainer.output_lock import locked
from rollq.consumer.trainer.ranks import Ranks, check_same, join_ranks
from rollq.consumer.trainer.recorded_run import RecordedRun, lineage_of
from rollq.consumer.trainer.reports import reporting
from rollq.consumer.trainer.trainer import Trainer


def train_from_archive(
    archive: Archive, settings: TrainerSettings, *, seed: int = 0, stop: threading.Event | None = None
) -> int:
    """Like `rollq.consumer.trainer.trainer.train`, but on a recorded run's batches, at most until the last.

    Raises `ArchiveError` for an archive that lacks groups, and for an output folder with checkpoints from another run;
    `ConfigError` for `draw_correction`, since an archive lacks the probabilities of draws, and if `settings.output`
    cannot be created or another trainer uses it.
    """
    check_packages(settings)
    if settings.advantages.draw_correction:
        raise ConfigError(
            "[trainer.advantages] draw_correction: the archive does not have the probabilities of draws; leave it out "
            "to train without the correction"
        )
    with join_ranks(settings.device) as ranks, locked(settings.output) if ranks.is_first else nullcontext():
        check_same(ranks, {**settings.model_dump(mode="json"), "seed": seed})
        return _train(archive, settings, ranks, seed, stop or threading.Event())


def _train(archive: Archive, settings: TrainerSettings, ranks: Ranks, seed: int, stop: threading.Event) -> int:
    checkpoint, learner = start_learner(settings, seed, ranks)
    if checkpoint is not None and checkpoint.lineage != lineage_of(archive):
        raise ArchiveError(
            f"[trainer] output: {str(settings.output)!r} has checkpoints that were not trained on this archive: name "
            "another folder"
        )
    step = 0 if checkpoint is None else checkpoint.step
    client = settings.consumer(rank=ranks.rank, world_size=ranks.world_size, launch_id=ranks.launch_id)
    recorded = RecordedRun(archive, resume_from=step, settings=client, stop=stop)
    if ranks.is_first:
        cut(settings.output, -1 if checkpoint is None else checkpoint.step)
    with reporting(recorded, archive.run()[0], settings, ranks, seed) as reports:
        return Trainer(recorded, learner, settings, ranks, stop, reports).run()
