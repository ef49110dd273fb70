"""Reports of the reference trainer: warnings, annotations, files, trackers, monitors and the terminal."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollq.consumer.batches.batch import Batch
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trackers.trackers import Trackers
from rollq.consumer.trainer.batch_warnings import BatchWarnings
from rollq.consumer.trainer.metrics_files import EVALUATIONS_FILE, METRICS_FILE, append
from rollq.consumer.trainer.observers import Observer, Update
from rollq.consumer.trainer.progress_bar import progress_bar
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.recorded_run import BatchSource

log = logging.getLogger(__name__)


@contextmanager
def reporting(
    source: BatchSource, run: str, settings: TrainerSettings, ranks: Ranks, seed: int
) -> Iterator[Sequence[Observer]]:
    """The observers of a trainer that continues after the step before `source.step`."""
    with (
        Trackers(settings, run, source.step, seed, on=ranks.is_first) as trackers,
        progress_bar(settings.steps, source.step - 1, is_shown=ranks.is_first) as show,
    ):
        yield (
            BatchWarnings(settings, on=ranks.is_first),
            Annotations(source),
            StepReports(settings.output, source, trackers, show),
        )


class Annotations(Observer):
    """Adds values of the loss tokens to the archive."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def on_update(self, update: Update) -> None:
        """See `Consumer.annotate`."""
        self._source.annotate(update.batch, *update.own.of_tokens())


class StepReports(Observer):
    """Reports metrics to the files of the output folder, trackers, monitors, the log, and the progress bar."""

    def __init__(
        self, output: Path, source: BatchSource, trackers: Trackers, show: Callable[[int, float, float], None]
    ) -> None:
        self._output = output
        self._source = source
        self._trackers = trackers
        self._show = show

    def on_step(self, line: Mapping[str, Any], batch: Batch) -> None:
        """Report a step, and what trackers have lost so far."""
        if lost := self._trackers.lost:
            line = {**line, "trackers": lost}
        append(self._output, METRICS_FILE, line)
        self._show(line["step"], line["reward"], line["tokens_per_s"])
        self._source.report(line)
        failed = int((~batch.valid).sum())
        left_out = f", {failed} of {len(batch.valid)} samples have failed" if failed else ""
        log.info(
            "step %(step)d: reward %(reward).3f, loss %(loss).4f, %(tokens)d tokens, waited %(wait_s).2f s, "
            "trained %(train_s).2f s, published %(publish_s).2f s%(left_out)s",
            {**line, "left_out": left_out},
        )
        self._trackers.log_step(line, batch)

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        """Report an evaluation."""
        append(self._output, EVALUATIONS_FILE, line)
        self._trackers.log_evaluation(line)
        values = {name: value for name, value in line.items() if name.startswith("eval/")}
        log.info("step %d: %s", line["step"], ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
