"""LoRA by PEFT (Hu et al. 2021, arXiv:2106.09685): the model is frozen, and an adapter is trained and published.

An adapter's file has the form that PEFT and vLLM read. Needs torch and peft.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open

from rollq.buffer.common.atomic_files import atomic_folder
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.manifest import ADAPTER_CONFIG, ADAPTER_FILE
from rollq.consumer.settings import LoraSettings
from rollq.consumer.trainer.sharding import like
from rollq.consumer.weights.checkpoint_format import state_dict_stream
from rollq.consumer.weights.safetensors import write_tensors
from rollq.consumer.weights.tensor_stream import TensorStream

_NAME = ".default."
"""The adapter's name, which PEFT inserts into the names of tensors in memory, but not in files."""


def add_adapter(model: Any, settings: LoraSettings) -> None:
    """Add an adapter to a transformers model in place. Only the adapter is trained. Initially it has no effect.

    Its parameters are float32 regardless of the model's dtype: updates at a small learning rate would be rounded away.
    Raises `ConfigError` if `targets` match no module, and without the package peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError("[trainer.lora] needs the package 'peft': pip install 'rollq[lora]'") from error
    targets = settings.targets if settings.targets == "all-linear" else list(settings.targets)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"[trainer.lora] targets = {settings.targets!r}: {error}") from error
    # Sorted: from a set, the file would differ between processes.
    config.target_modules = sorted(config.target_modules or ())
    model.rollq_adapter = config
    for parameter in _adapter(model).values():
        parameter.data = parameter.data.float()


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Run `model` without its adapter, as before training."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def has_adapter(model: Any) -> bool:
    """Whether `add_adapter` has added an adapter."""
    return hasattr(model, "rollq_adapter")


def save_adapter(folder: Path, model: Any, *, rank: int = 0, dtype: str = "float32") -> None:
    """Write the adapter of `model`, rounded to `dtype`, as a folder that replaces an older folder.

    All ranks call it, and rank 0 writes.
    """
    with adapter_stream(model, dtype=dtype) as stream:
        if rank == 0:
            with atomic_folder(folder) as unfinished:
                write_adapter(unfinished, model, stream)


def write_adapter(folder: Path, model: Any, stream: TensorStream) -> None:
    """Write an adapter's tensors and configuration into an existing folder."""
    model.rollq_adapter.save_pretrained(str(folder))
    write_tensors(folder / ADAPTER_FILE, stream)


def adapter_stream(model: Any, *, dtype: str = "float32") -> TensorStream:
    """The adapter's tensors, possibly sharded, by their names in files and rounded to `dtype`."""
    return state_dict_stream(_adapter(model), dtype=dtype)


def load_adapter(folder: Path, model: Any) -> None:
    """Load an adapter's tensors, or this rank's parts of them, into the adapter of `model`.

    Raises `WeightsError` for a folder without an adapter, and for an adapter with different modules, rank or alpha.
    """
    path = folder / ADAPTER_FILE
    if not path.exists():
        raise WeightsError(f"checkpoint {str(folder)!r} has no adapter: it was saved without [trainer.lora]")
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    own = _adapter(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    alpha = orjson.loads((folder / ADAPTER_CONFIG).read_bytes())["lora_alpha"]
    expected = {name: tuple(parameter.shape) for name, parameter in own.items()}
    if shapes != expected or alpha != model.rollq_adapter.lora_alpha:
        raise WeightsError(
            f"checkpoint {str(folder)!r} has an adapter whose targets, rank or alpha differ from [trainer.lora]: "
            "restore these settings, or name another output folder"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(like(tensors[name].to(parameter.dtype), parameter))


def _adapter(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by their names in files."""
    return {
        f"base_model.model.{name.replace(_NAME, '.')}": parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
