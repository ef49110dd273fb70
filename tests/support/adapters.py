"""LoRA adapters of the tiny models that tests with vLLM serve."""

from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file, save_file


def lora(folder: Path, base: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of all projections of the attention of the model in `base`, as PEFT writes it, in `folder`."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors, modules = {}, set()
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight") and ".self_attn." in name:
            out, into = weight.shape
            adapted = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{adapted}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.3
            tensors[f"{adapted}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
            modules.add(adapted.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
    return folder


def without_layer_1(folder: Path) -> Path:
    """The adapter in `folder`, without the tensors of its second layer."""
    tensors = load_file(folder / "adapter_model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(rest, folder / "adapter_model.safetensors")
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The model with the adapter in its weights."""
    folder.mkdir(exist_ok=True)
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, delta = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(delta):
        if name.endswith("lora_A.weight"):
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            tensors[target] = tensors[target] + delta[name.replace("lora_A", "lora_B")] @ delta[name]
    save_file(tensors, folder / "model.safetensors")
    return folder
