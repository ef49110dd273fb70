"""A trainer publishes what one process publishes, whatever the number of its ranks.

Gradients of several ranks differ from those of one process in their last bits, since they are summed in another order.
So names and files are compared with those of one process, and values, bit by bit, with the run's own weights as torch
gathers them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.manifest import ADAPTER_FILE, INDEX_FILE, WEIGHTS_FILE, weight_files
from rollq.buffer.weights.store import read_probe
from rollq.consumer.trainer.checkpoints import newest_checkpoint
from rollq.workers.engines.transformers.weights import read_weights
from support.tiny_qwen3 import tiny_qwen3
from support.trainer_rank import filled, metrics, run_ranks, short_training

# PEFT 0.21 reads an attribute of models that transformers 5.24 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

State = dict[str, torch.Tensor]
SHARDS = {"max_file_bytes": 20_000, "transport": "path"}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "untied": (False, {}),
    "untied, rounded, in shards": (False, {**SHARDS, "publish_dtype": "bfloat16"}),
    "tied, in shards": (True, {**SHARDS, "full_every": 2}),
    "tied, rounded": (True, {"publish_dtype": "bfloat16"}),
    "adapter": (False, {"lora": {"rank": 4}}),
}
ALWAYS = ("tied, in shards",)
"""The case of the default suite. The others are slow."""


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES]
)
def test_ranks_publish_the_files_of_one_process_with_their_own_weights(
    case: str, server_url: str, run_name: str, tmp_path: Path
) -> None:
    tied, changed = CASES[case]
    model = tiny_qwen3(tied=tied)
    model.save_pretrained(tmp_path / "model")
    layouts = []
    for world_size in (1, 2, 4):
        run, gathered = f"{run_name}{world_size}", tmp_path / f"gathered{world_size}"
        gathered.mkdir()
        settings = short_training(tmp_path / "model", tmp_path / f"out{world_size}", learning_rate=3e-3, **changed)
        with filled(server_url, run, tmp_path / "model", tmp_path / f"worker{world_size}", 4, tied=tied) as buffer:
            for steps in (2, 4) if world_size == 2 else (4,):
                # a second start finds that its checkpoint, as it is published, is what is live
                changes = {"steps": steps, "on_replay_mismatch": "fail" if world_size == 2 and steps == 4 else "warn"}
                chosen = settings.model_copy(update=changes)
                assert run_ranks(world_size, server_url, run, chosen, gathered=gathered) == [0] * world_size
            live = buffer.live_model()
            assert live is not None
            assert live.version == 4
            folder = load_weights(buffer, live.uri, live.digest, tmp_path / f"worker{world_size}")
            probe = read_probe(buffer, live.digest)
        assert len(metrics(settings)) == 4
        trained = load_file(gathered / "4.safetensors")
        expected = adapter_of(trained) if "lora" in changed else model_of(trained, tied, changed.get("publish_dtype"))
        check_same_bits(folder, expected)
        assert probe is not None
        assert probe.dtype == changed.get("publish_dtype", "float32")
        if "lora" not in changed:
            check_loads(folder, tmp_path / "model", expected)
            checkpoint = newest_checkpoint(settings.output)
            assert checkpoint is not None
            check_same_bits(checkpoint.folder, model_of(trained, tied, None))
        layouts.append(layout_of(folder))
    assert layouts[1:] == layouts[:1] * 2
    assert (INDEX_FILE in layouts[0]) == ("max_file_bytes" in changed)


def model_of(trained: State, tied: bool, dtype: str | None) -> State:
    """The tensors of the files of a model, from those in memory."""
    kept = {name: tensor for name, tensor in trained.items() if not (tied and name == "lm_head.weight")}
    return {name: tensor if dtype is None else tensor.to(getattr(torch, dtype)) for name, tensor in kept.items()}


def adapter_of(trained: State) -> State:
    return {
        f"base_model.model.{name.replace('.default.', '.')}": tensor
        for name, tensor in trained.items()
        if ".lora_" in name
    }


def check_same_bits(folder: Path, expected: State) -> None:
    """The files of a folder have the expected tensors, and a single one has the bytes that safetensors writes."""
    files = weight_files(folder)
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    if len(files) == 1:
        assert files[0].name in (WEIGHTS_FILE, ADAPTER_FILE)
        assert files[0].read_bytes() == save(expected, {"format": "pt"})


def check_loads(folder: Path, config_from: Path, expected: State) -> None:
    """transformers loads a folder beside its configuration, and so does a worker's engine."""
    state = {path: load_file(path) for path in weight_files(folder)}
    merged = {name: tensor for tensors in state.values() for name, tensor in tensors.items()}
    config = folder / "config.json"
    config.write_bytes((config_from / "config.json").read_bytes())
    try:
        dtype = next(iter(expected.values())).dtype
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    finally:
        config.unlink()
    for name, tensor in expected.items():
        assert loaded[name].equal(tensor), name
    assert merged.keys() == read_weights(folder, AutoModelForCausalLM.from_pretrained(config_from)).keys()


def layout_of(folder: Path) -> dict[str, Any]:
    """The names of the files, and what is in them besides values: headers, and the index."""
    found: dict[str, Any] = {}
    for path in (*weight_files(folder), *folder.glob("*.json")):
        data = path.read_bytes()
        found[path.name] = data[: 8 + int.from_bytes(data[:8], "little")] if path.suffix == ".safetensors" else data
    return found
