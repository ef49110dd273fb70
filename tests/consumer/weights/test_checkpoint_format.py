"""Models of many families are published as `save_pretrained` writes them, bit by bit; others are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.broadcast_log import BroadcastLog
from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.store import StoredWeights
from rollq.consumer import Consumer, to_checkpoint_format
from rollq.consumer.trainer.checkpoints import save_checkpoint
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.sender import Sender
from rollq.consumer.weights.sources import weights_source
from support.gloo_group import ADDRESS, GlooRendezvous
from support.manual_worker import make_run
from support.tiny_qwen3 import tiny_qwen3
from support.untrained_models import FAMILIES, FUSED, make_model

every_family = pytest.mark.parametrize("family", FAMILIES)
every_fused_family = pytest.mark.parametrize("family", FUSED)


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].contiguous().view(torch.uint8).equal(tensor.view(torch.uint8)), name


def gathered(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict as it comes from a gather: nothing in it shares memory."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def published(buffer: Buffer, stored: StoredWeights, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(load_weights(buffer, *stored, into=folder) / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_family
def test_a_model_is_published_as_it_is_saved(family: str, dtype: torch.dtype, buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    model = make_model(family, dtype)
    stored = WeightPublisher(buffer, "redis", None, 3).put(weights_source(model))
    check_equal(published(buffer, stored, tmp_path / "worker"), saved(model, tmp_path / "saved"))


@every_family
def test_a_gathered_state_dict_is_converted_without_the_parameters_of_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    converted = to_checkpoint_format(make_model(family, device="meta"), gathered(model))
    check_equal(converted, saved(model, tmp_path))


@every_family
def test_a_model_that_was_loaded_is_published_as_its_files_are(family: str, tmp_path: Path) -> None:
    expected = saved(make_model(family), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    check_equal(to_checkpoint_format(loaded, loaded.state_dict()), expected)


def test_a_tied_tensor_may_come_under_either_name(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=True)
    state = gathered(model)
    del state["model.embed_tokens.weight"]
    check_equal(to_checkpoint_format(model, state), saved(model, tmp_path))


def test_tied_tensors_that_differ_are_refused() -> None:
    model = tiny_qwen3(tied=True)
    state = gathered(model)
    state["lm_head.weight"] += 1
    with pytest.raises(WeightsError, match=r"^'lm_head.weight' differs from 'model.embed_tokens.weight', .* ties it"):
        to_checkpoint_format(model, state)


def test_a_state_dict_of_anything_but_tensors_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"^'head\.weight' has the type ndarray: must be a torch tensor"):
        weights_source({"head.weight": np.zeros(3, np.float32)})


def test_sharded_tensors_are_refused() -> None:
    model = tiny_qwen3()
    state = gathered(model)
    state["model.norm.weight"].full_tensor = None  # type: ignore[attr-defined]  # what a DTensor has
    with pytest.raises(WeightsError, match=r"^tensor 'model.norm.weight' is sharded over ranks: publish the model"):
        to_checkpoint_format(model, state)


def test_a_sharded_model_is_refused_without_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 publishes: a forward pass would wait for the other ranks."""
    model = tiny_qwen3()
    state = gathered(model)
    state["model.norm.weight"].full_tensor = None  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "state_dict", lambda: state)
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("a forward pass"))
    with pytest.raises(WeightsError, match="is sharded over ranks"):
        weights_source(model)


@pytest.mark.parametrize("weights", ["/a/path", torch.nn.DataParallel(tiny_qwen3()), torch.nn.Linear(1, 1)])
def test_what_is_neither_model_nor_state_dict_nor_folder_is_refused(weights: Any) -> None:
    with pytest.raises(WeightsError, match=f"^cannot publish a {type(weights).__name__}: publish a transformers.Pre"):
        weights_source(weights)


@every_fused_family
def test_a_state_dict_with_fused_experts_is_refused_where_it_is_published(
    family: str, server_url: str, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer)
    model = make_model(family)
    expected = saved(model, tmp_path / "model")
    with Consumer.connect(server_url, run=buffer.run, weights=tmp_path / "model") as consumer:
        with pytest.raises(WeightsError, match=r"^these weights do not match .* they lack '.*experts.*to_checkpoint_f"):
            consumer.publish(model.state_dict(), step=0)
        for weights in (model, to_checkpoint_format(model, gathered(model))):
            consumer.publish(weights, step=0)
            live = buffer.live_model()
            assert live is not None
            check_equal(published(buffer, StoredWeights(live.uri, live.digest), tmp_path / "worker"), expected)


def test_a_tensor_of_another_shape_than_at_the_start_is_refused(buffer: Buffer) -> None:
    buffer.create_run()
    publisher = WeightPublisher(buffer, "redis", None, 3)
    publisher.start(weights_source(tiny_qwen3()))
    state = {**tiny_qwen3().state_dict(), "model.norm.weight": torch.ones(0)}  # what DeepSpeed leaves of its shards
    with pytest.raises(WeightsError, match=r"'model.norm.weight' has shape \(0,\), not \(32,\)\. Pass the model"):
        publisher.announce(weights_source(state), 1)


def test_a_state_dict_with_other_tensors_than_at_the_start_is_refused(buffer: Buffer) -> None:
    buffer.create_run()
    publisher = WeightPublisher(buffer, "redis", None, 3)
    state = gathered(tiny_qwen3())
    publisher.start(weights_source(state))
    half = {name: tensor for name, tensor in state.items() if "layers.1." not in name}
    for other, problem in (
        (half, r"they lack 'model\.layers\.1\.\S+'\. Pass the model"),
        ({}, r"they lack '\S+'\. Pass the model"),
        ({**state, "extra": torch.ones(1)}, r"they also have 'extra'\. Pass the model"),
    ):
        with pytest.raises(WeightsError, match=problem):
            publisher.announce(weights_source(other), 1)


@pytest.mark.parametrize("headed", [True, False])
def test_a_tied_head_may_be_in_a_state_dict_or_in_the_first_folder_alone(
    headed: bool, buffer: Buffer, tmp_path: Path
) -> None:
    buffer.create_run()
    model = tiny_qwen3(tied=True)
    plain = saved(model, tmp_path / "saved")
    both: list[Mapping[str, torch.Tensor]] = [plain, gathered(model)]
    first, second = both if headed else reversed(both)
    publisher = WeightPublisher(buffer, "redis", None, 3)
    publisher.start(weights_source(first))
    check_equal(published(buffer, publisher.announce(weights_source(second), 1), tmp_path), second)


def test_after_an_adapter_any_state_dict_is_published(buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    saved(tiny_qwen3(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    publisher = WeightPublisher(buffer, "redis", None, 3)
    publisher.start(weights_source(tmp_path))
    publisher.announce(weights_source({"w": torch.zeros(1)}), 1)


def test_a_model_is_broadcast_as_it_is_saved(buffer: Buffer, tmp_path: Path) -> None:
    make_run(buffer)
    model = make_model("qwen3_moe", torch.bfloat16)
    sender = Sender(buffer, GlooRendezvous(), address=ADDRESS, join_s=1, timeout_s=1)
    publisher = WeightPublisher(buffer, "nccl", None, 3, sender=sender)
    publisher.announce(weights_source(model), 1)
    specs = {spec.name: (spec.dtype, spec.shape) for spec in BroadcastLog(buffer, 1).read().tensors}
    expected = saved(model, tmp_path)
    assert specs == {name: ("bfloat16", tuple(tensor.shape)) for name, tensor in expected.items()}
    check_equal(sender._tensors, expected)
    publisher.start(weights_source(tmp_path))
    with pytest.raises(WeightsError, match="these weights do not match"):
        publisher.announce(weights_source(model.state_dict()), 2)


@every_fused_family
def test_checkpoints_of_the_trainer_hold_what_is_published(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    expected = saved(model, tmp_path / "saved")
    optimizer = torch.optim.AdamW(model.parameters())
    folder = save_checkpoint(tmp_path / "out", 1, "", model, optimizer, tmp_path / "saved").folder
    check_equal(load_file(folder / "model.safetensors"), expected)
    check_equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), model.state_dict())
