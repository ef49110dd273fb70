"""Records of training on disk, for later verification: the tokens of every batch and the weights of every version.

python -m benchmarks.recorder rollq.toml

trains like `rollq train`, and records into the folder `record` beside the settings file:

record/batches/step-<step>.safetensors: T tokens of n sequences, concatenated
    ids, versions, epochs, staleness int32 [T]; logprobs float32 [T]; loss_mask bool [T]; cu_seqlens int64 [n + 1];
    temperature float32 [n]; advantages float32 [n]; group_ids int64 [n]; metadata `tasks`: JSON, a name per sequence
record/weights/epoch-<epoch>-version-<version>/: a folder that `from_pretrained` loads
"""

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from safetensors.numpy import save

from rollq.buffer.common.atomic_files import atomic_file, atomic_folder
from rollq.buffer.errors import InvalidGroup
from rollq.cli.run_location import RunLocation, fingerprints, open_run
from rollq.cli.settings.file import load_settings
from rollq.cli.signals import stop_on_signals
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import MAX_FILE_BYTES, TrainerSettings
from rollq.consumer.trainer.observers import Observer, Update
from rollq.consumer.trainer.trainer import train
from rollq.consumer.weights.checkpoint_format import model_stream
from rollq.consumer.weights.model_folders import write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Recorder(Observer):
    """Records the batches and the weights of a trainer in one process, which trains whole models."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        self._folder = folder
        self._settings = settings

    def on_update(self, update: Update) -> None:
        """Record a batch, before it is committed."""
        record_batch(self._folder, update.batch)

    def on_publish(self, epoch: int, version: int, model: "PreTrainedModel") -> None:
        """Record weights, rounded as they are published, with the configuration of the first weights."""
        folder = self._folder / "weights" / f"epoch-{epoch}-version-{version}"
        with model_stream(model, dtype=self._settings.consumer().publish_dtype) as stream, atomic_folder(folder) as new:
            write_model(new, stream, max_file_bytes=MAX_FILE_BYTES, config_from=self._settings.model)


class LogprobCheck(Observer):
    """Stops at an on-policy logprob that differs from the engine's by more than `limit`, in nats."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def on_update(self, update: Update) -> None:
        """Raises `InvalidGroup` for such a batch, which is then neither published nor committed."""
        error = update.metrics.loss.on_policy_error
        if error > self._limit:
            raise InvalidGroup(
                f"step {update.batch.step}: logprobs of staleness 0 differ by up to {error:.2g} from the engine's, "
                f"more than {self._limit}: weights, temperature or masks differ"
            )


def record_batch(folder: Path, batch: Batch) -> None:
    """Write the whole batch of a step, which is read for this purpose."""
    sequences = batch.sequences
    per_token = ("ids", "versions", "epochs", "staleness", "logprobs", "loss_mask")
    arrays = {name: np.concatenate([getattr(sequence, name) for sequence in sequences]) for name in per_token}
    arrays |= {
        "cu_seqlens": np.cumsum([0, *(len(sequence.ids) for sequence in sequences)]),
        "temperature": np.array([sequence.temperature for sequence in sequences], np.float32),
        "advantages": np.array([batch.advantages[sequence.sample] for sequence in sequences], np.float32),
        "group_ids": np.array([sequence.group_id for sequence in sequences]),
    }
    path = folder / "batches" / f"step-{batch.step:08d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = orjson.dumps([sequence.task for sequence in sequences]).decode()
    atomic_file(path, save(arrays, {"tasks": tasks}))


def train_recorded(file: Path, limit: float) -> None:
    """Train by a settings file, as `rollq train` does, and record beside it. `limit` is described in `LogprobCheck`."""
    settings = load_settings(file)
    trainer = settings.trainer
    assert trainer is not None
    stop, location = stop_on_signals(), RunLocation.from_settings(settings)
    with open_run(settings, threading.Event(), **fingerprints(trainer.model, trainer.model, "trainer.model")):
        connection = Connection(location.buffer_url, location.run, location.password, location.payloads)
    observers = (Recorder(file.parent / "record", trainer), LogprobCheck(limit))
    train(connection, trainer, seed=settings.seed, stop=stop, observers=observers)


if __name__ == "__main__":
    train_recorded(Path(sys.argv[1]), 1e-4)
