"""Records of training on disk, for later verification: the tokens of every batch and the weights of every version.

folder/batches/step-<step>.safetensors: T tokens of n sequences, concatenated
    ids, versions, epochs, staleness int32 [T]; logprobs float32 [T]; loss_mask bool [T]; cu_seqlens int64 [n + 1];
    temperature float32 [n]; advantages float32 [n]; group_ids int64 [n]; metadata `tasks`: JSON, a name per sequence
folder/weights/epoch-<epoch>-version-<version>/: a folder that `from_pretrained` loads
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from safetensors.numpy import save

from rollq.buffer.common.atomic_files import atomic_file, atomic_folder
from rollq.consumer.batches.batch import Batch
from rollq.consumer.settings import MAX_FILE_BYTES
from rollq.consumer.weights.safetensors import write_model
from rollq.consumer.weights.sources import model_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def record_batch(folder: Path, batch: Batch) -> None:
    """Write the whole batch (all ranks) of a step, which is read for it: call it before the step is committed."""
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


def record_weights(
    folder: Path,
    epoch: int,
    version: int,
    model: "PreTrainedModel",
    config_from: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    rank: int = 0,
    dtype: str | None = None,
) -> None:
    """Write the weights of a version as a complete Hugging Face folder, with configuration from `config_from`.

    `dtype` is what they are rounded to as they are published, None if they are not. All ranks of a sharded model call
    it, and rank 0 writes.
    """
    with model_stream(model, dtype=dtype) as stream:
        if rank == 0:
            with atomic_folder(folder / "weights" / f"epoch-{epoch}-version-{version}") as unfinished:
                write_model(unfinished, stream, max_file_bytes=max_file_bytes, config_from=config_from)
