"""The model that training began with: the base of the adapter and the reference of the KL term.

Each checkpoint records the digest of that model's weights, so resumed training cannot use another model unnoticed.
"""

import logging
from contextlib import suppress
from pathlib import Path

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.manifest import ADAPTER_FILE, describe_folder, digest_of
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.checkpoints import Checkpoint
from rollq.consumer.trainer.ranks import Ranks

log = logging.getLogger(__name__)


def initial_digest(folder: Path, ranks: Ranks) -> str | None:
    """The digest of the weights in `folder`, None if they are not in safetensors files. All ranks call it.

    One rank of each machine reads them. Raises `ConfigError` if a machine's weights differ from rank 0's.
    """
    own = None
    if ranks.local_rank == 0:
        with suppress(WeightsError):
            own = digest_of(describe_folder(folder).encode())
    first: str | None = ranks.gather(own)[0]
    if ranks.local_rank == 0 and own != first:
        raise ConfigError(
            f"[trainer] model = {str(folder)!r}: rank {ranks.rank} finds different weights there than rank 0: copy "
            "the model to this machine again"
        )
    return first


def check_kind(checkpoint: Checkpoint, settings: TrainerSettings) -> None:
    """Raise `WeightsError` if a checkpoint has only an adapter, and the settings train no adapter."""
    if settings.lora is None and (checkpoint.folder / ADAPTER_FILE).exists():
        raise WeightsError(
            f"checkpoint {str(checkpoint.folder)!r} has an adapter but no model: it was saved with [trainer.lora]; "
            "restore that table, or name another output folder"
        )


def check_initial(checkpoint: Checkpoint, found: str | None, settings: TrainerSettings, ranks: Ranks) -> None:
    """If `found` differs from the digest in a checkpoint, raise `ConfigError` if the checkpoint needs its initial
    model, and warn otherwise. A checkpoint without a digest passes.
    """
    if checkpoint.initial is None or found == checkpoint.initial:
        return
    where = (
        f"[trainer] model = {str(settings.model)!r}: checkpoint {str(checkpoint.folder)!r} was trained from different"
    )
    remedy = "name the model that training started from, or another output folder"
    if settings.lora is not None:
        raise ConfigError(f"{where} weights, and has only an adapter on them: {remedy}")
    if settings.loss.kl_coefficient > 0:
        raise ConfigError(f"{where} weights, and kl_coefficient would compare with these from now on: {remedy}")
    if ranks.is_first:
        log.warning("%s weights; training continues with the checkpoint's, and these have no effect", where)
