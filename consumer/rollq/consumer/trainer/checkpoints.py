"""Checkpoints of the reference trainer: folders that `from_pretrained` loads, with the optimizer's state.

Invariant: a checkpoint contains its step, and appears complete or not at all, so weights and step cannot disagree. The
buffer's guarantee that no batch is trained twice depends on it. A folder is a checkpoint if its name matches the step
that it contains. Other folders, such as renamed copies, are never resumed from or removed.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import orjson
import torch
from safetensors import safe_open
from safetensors.torch import save

from rollq.buffer.common.atomic_files import atomic_folder
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.consumer.settings import KEPT_CHECKPOINTS, MAX_FILE_BYTES
from rollq.consumer.trainer.lora import adapter_stream, has_adapter, write_adapter
from rollq.consumer.trainer.sharding import like, reshard
from rollq.consumer.weights.checkpoint_format import model_stream, state_dict_stream
from rollq.consumer.weights.model_folders import copy_config, write_model
from rollq.consumer.weights.safetensors import write_tensors
from rollq.consumer.weights.tensor_stream import TensorStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"
EXPORTS = "exports"
"""The folder in a trainer's output for exported weights."""

_STEP = re.compile(r"step-\d+")


class Checkpoint(NamedTuple):
    """`folder` holds the weights after train step `step`. `lineage` is the `Consumer`'s, and `initial` is the digest of
    the weights that training started from, None if unknown."""

    step: int
    folder: Path
    lineage: str | None
    initial: str | None = None

    def encode(self) -> bytes:
        """The content of `STATE_FILE`."""
        return orjson.dumps({"step": self.step, "lineage": self.lineage, "initial": self.initial})


def newest_checkpoint(output: Path) -> Checkpoint | None:
    """The checkpoint with the highest step in a trainer's output folder; None if there is none.

    Raises `ConfigError` if a `STATE_FILE` there does not contain a step.
    """
    return max(_checkpoints(output), default=None, key=lambda one: one.step)


def save_checkpoint(
    output: Path,
    step: int,
    lineage: str,
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    config_from: Path,
    *,
    initial: str | None = None,
    kept: int = KEPT_CHECKPOINTS,
    max_file_bytes: int = MAX_FILE_BYTES,
    with_optimizer: bool = True,
    rank: int = 0,
) -> Checkpoint:
    """Write the checkpoint of `step`, with the configuration files of `config_from`. Of the checkpoints up to this
    step, only the last `kept` stay. Without the optimizer's state, a trainer that resumes from the checkpoint starts
    with a new optimizer.

    The optimizer's file does not depend on the number of ranks. All ranks of a sharded model call this, and rank 0
    writes.
    """
    made = Checkpoint(step, _folders(output) / step_name(step), lineage, initial)
    reshard(model)  # a publication's probe leaves some parameters gathered, and the optimizer cannot use them
    moments = state_dict_stream(dict(_optimizer_tensors(model, optimizer)) if with_optimizer else {})
    with moments, _weights_of(model) as weights:  # on exit, all ranks gather the rest of the weights first
        if rank != 0:
            return made
        with atomic_folder(made.folder) as unfinished:
            _write_weights(unfinished, model, weights, config_from, max_file_bytes)
            write_tensors(unfinished / OPTIMIZER_FILE, moments)
            (unfinished / STATE_FILE).write_bytes(made.encode())
    earlier = sorted(
        (checkpoint for checkpoint in _checkpoints(output) if checkpoint.step <= step),
        key=lambda checkpoint: checkpoint.step,
    )
    for old in earlier[:-kept]:
        shutil.rmtree(old.folder)
    return made


def export_weights(
    output: Path,
    step: int,
    model: "PreTrainedModel",
    config_from: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    rank: int = 0,
) -> Path:
    """Write the weights of `step` to a permanent folder that `from_pretrained` loads. Returns the folder.

    All ranks of a sharded model call it, and rank 0 writes.
    """
    folder = output / EXPORTS / step_name(step)
    reshard(model)
    with _weights_of(model) as weights:
        if rank == 0:
            with atomic_folder(folder) as unfinished:
                _write_weights(unfinished, model, weights, config_from, max_file_bytes)
    return folder


def _weights_of(model: "PreTrainedModel") -> TensorStream:
    """The trained weights: only the adapter's if the model has an adapter."""
    return adapter_stream(model) if has_adapter(model) else model_stream(model)


def _write_weights(
    folder: Path, model: "PreTrainedModel", weights: TensorStream, config_from: Path, max_file_bytes: int
) -> None:
    copy_config(config_from, folder)
    if has_adapter(model):
        write_adapter(folder, model, weights)
    else:
        write_model(folder, weights, max_file_bytes=max_file_bytes)


def recorded_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`, from the file that a trainer wrote there; None without that file.

    Raises `ConfigError` if that file does not give a step.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = orjson.loads(path.read_bytes())
        return Checkpoint(int(state["step"]), folder, state.get("lineage"), state.get("initial"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} does not give the step of the weights beside it: {error!r}") from error


def adopt_weights(output: Path, step: int, weights: Path, config_from: Path) -> Checkpoint:
    """Make a checkpoint of `step` from the weights in the folder `weights`, without the optimizer's state.

    The checkpoint gets the configuration files of `config_from`. Raises `ConfigError` if the folder has no safetensors,
    or if a checkpoint of that step or a later one exists.
    """
    newest = newest_checkpoint(output)
    if newest is not None and newest.step >= step:
        raise ConfigError(
            f"{str(newest.folder)!r} is a checkpoint of step {newest.step}: `rollq train` resumes from it. To go back "
            f"to step {step}, move it elsewhere first"
        )
    files = [path for path in sorted(weights.glob("*.safetensors*")) if not path.name.startswith("optimizer")]
    if not files:
        raise ConfigError(f"--weights {str(weights)!r}: there are no weights, *.safetensors, in this folder")
    recorded = recorded_checkpoint(weights)
    made = Checkpoint(step, _folders(output) / step_name(step), None, recorded and recorded.initial)
    with atomic_folder(made.folder) as unfinished:
        copy_config(config_from, unfinished)
        for path in files:
            shutil.copyfile(path, unfinished / path.name)
        (unfinished / OPTIMIZER_FILE).write_bytes(save({}))
        (unfinished / STATE_FILE).write_bytes(made.encode())
    return made


def load_optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state for each parameter of `model`, or this rank's part of it.

    A checkpoint that was saved without that state restores nothing. Raises `WeightsError` if `OPTIMIZER_FILE` is
    missing, or if its parameters do not match the model's in names and shapes.
    """
    parameters = dict(model.named_parameters())
    path = folder / OPTIMIZER_FILE
    if not path.exists():
        raise WeightsError(
            f"checkpoint {str(folder)!r} has no {OPTIMIZER_FILE}: move it elsewhere, and make a checkpoint of its "
            "weights with `rollq runs recover --weights`"
        )
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            name, _, slot = key.rpartition(".")
            tensor = file.get_tensor(key)
            parameter = parameters.get(name)
            if parameter is None or (tensor.ndim and tensor.shape != parameter.shape):
                raise WeightsError(
                    f"checkpoint {str(folder)!r} belongs to another model: it has optimizer state for {name!r} of "
                    f"shape {tuple(tensor.shape)}"
                )
            # scalars (the count of updates) stay on the CPU, where the optimizer keeps them
            moment = like(tensor.to(parameter.dtype), parameter) if tensor.ndim else tensor
            optimizer.state[parameter][slot] = moment


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def _folders(output: Path) -> Path:
    return output / "checkpoints"


def _checkpoints(output: Path) -> list[Checkpoint]:
    """The checkpoints in a trainer's output folder, unordered. Raises the exceptions of `recorded_checkpoint`."""
    recorded = (
        recorded_checkpoint(folder) for folder in _folders(output).glob("step-*") if _STEP.fullmatch(folder.name)
    )
    return [
        checkpoint
        for checkpoint in recorded
        if checkpoint is not None and checkpoint.folder.name == step_name(checkpoint.step)
    ]


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}.{key}", value.contiguous()
