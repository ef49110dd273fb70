"""The reference trainer with an adapter: what is trained, published and kept is the adapter alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.manifest import ADAPTER_FILE
from rollq.buffer.weights.store import read_probe
from rollq.consumer.settings import LoraSettings, TrainerSettings
from rollq.consumer.trainer.checkpoints import newest_checkpoint
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.lora import add_adapter, load_adapter, save_adapter, without_adapter
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.tensors import read_tensors
from rollq.workers.engines.vllm.adapter_files import check_adapter
from support.tiny_qwen3 import tiny_qwen3
from support.trainer_rank import Kill, filled, metrics, run_ranks, short_training

# PEFT 0.21 reads an attribute of models that transformers 5.24 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSettings]:
    lora = {"learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 8}, "loss": {"kl_coefficient": 0.05}}
    return lambda output, **changed: short_training(model_folder, tmp_path / output, **{**lora, **changed})


def test_a_new_adapter_changes_nothing_and_only_its_tensors_have_gradients(tmp_path: Path) -> None:
    model = tiny_qwen3().eval()
    before = model(IDS).logits
    add_adapter(model, LoraSettings(rank=4))
    assert model(IDS).logits.equal(before)
    model(IDS).logits.sum().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_an_adapter_that_is_saved_is_read_by_peft_and_passes_the_check_of_vllm(
    model_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    before = model(IDS).logits
    add_adapter(model, LoraSettings(rank=4))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    after = model(IDS).logits
    assert not after.allclose(before)
    with without_adapter(model):
        assert model(IDS).logits.equal(before)
    assert model(IDS).logits.equal(after)
    save_adapter(tmp_path / "adapter", model)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    assert PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits.allclose(after, atol=1e-6)
    check_adapter(tmp_path / "adapter", read_tensors(model_folder), layers=model.config.num_hidden_layers)
    again = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    add_adapter(again, LoraSettings(rank=4))
    load_adapter(tmp_path / "adapter", again)
    assert again(IDS).logits.equal(after)
    add_adapter(other := tiny_qwen3(), LoraSettings(rank=2))
    add_adapter(scaled := tiny_qwen3(), LoraSettings(rank=4, alpha=64))
    for changed in (other, scaled):
        with pytest.raises(WeightsError, match=r"whose targets, rank or alpha differ from \[trainer.lora"):
            load_adapter(tmp_path / "adapter", changed)
    with pytest.raises(WeightsError, match=r"has no adapter: it was saved without \[trainer.lora\]"):
        load_adapter(model_folder, other)


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^\[trainer.lora\] targets = \['query'\]: .*query"):
        add_adapter(tiny_qwen3(), LoraSettings(targets=["query"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transport": "nccl", "device": "cuda"}, "transport 'nccl' sends whole models"),
        ({"replay_experts": True}, "replay_experts trains routers"),
        ({"publish_dtype": "bfloat16"}, "publish_dtype rounds whole models"),
    ],
)
def test_settings_that_need_whole_models_are_refused(
    settings: Callable[..., TrainerSettings], changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings("out", **changed)


@pytest.mark.slow  # three starts of two ranks
def test_two_ranks_train_and_resume_the_adapter_of_one_process(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], model_folder: Path, tmp_path: Path
) -> None:
    """One rank is killed in between; what workers get at the end is the adapter with the probe of the trainer."""
    from peft import PeftModel

    adapters = {}
    for world_size in (1, 2):
        run, chosen = f"{run_name}{world_size}", settings(f"out{world_size}")
        with filled(server_url, run, model_folder, tmp_path / run, 4) as buffer:
            if world_size == 2:
                codes = run_ranks(2, server_url, run, chosen, Kill(1, "before update", 4))
                assert codes[1] == -9
                assert codes[0] != 0
            assert run_ranks(world_size, server_url, run, chosen) == [0] * world_size
            live = buffer.live_model()
            assert live is not None
            published = load_weights(buffer, live.uri, live.digest, tmp_path / f"worker{world_size}")
            probe = read_probe(buffer, live.digest)
        checkpoint = newest_checkpoint(chosen.output)
        assert checkpoint is not None
        adapters[world_size] = load_file(checkpoint.folder / ADAPTER_FILE)
        assert (published / ADAPTER_FILE).read_bytes() == (checkpoint.folder / ADAPTER_FILE).read_bytes()
        assert not (checkpoint.folder / "model.safetensors").exists()
        assert [line["step"] for line in metrics(chosen)] == [1, 2, 3, 4]
    assert adapters[1].keys() == adapters[2].keys()
    for name, tensor in adapters[1].items():
        assert tensor.any()
        assert tensor.allclose(adapters[2][name], atol=1e-4), name
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), published).eval()
    assert probe is not None
    for one, other in zip(probe.logprobs, probe_of(served).logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_adapters_of_steps_that_were_undone_go_and_the_one_that_is_published_stays(
    settings: Callable[..., TrainerSettings],
) -> None:
    learner = Learner(settings("out", loss={}), None, Ranks())
    for step in range(1, 16):
        learner.weights(step)
    folder = learner.weights(10)
    assert isinstance(folder, Path)
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["step-00000010"]
    assert (folder / ADAPTER_FILE).exists()
