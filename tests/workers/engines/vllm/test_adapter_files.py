"""An adapter that lacks modules which its configuration names is refused; vLLM is not needed for that."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Tensor
from rollq.workers.engines.tensors import Tensors
from rollq.workers.engines.vllm.adapter_files import check_adapter

LAYERS = 4
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{expert}.{name}_proj" for expert in range(3) for name in ("gate", "up", "down")]


def modules(*parts: str, layers: Iterable[int] = range(LAYERS), stack: str = "model.layers") -> list[str]:
    return [f"{stack}.{layer}.{part}" for layer in layers for part in parts]


def tensors(*names: str) -> Tensors:
    outside = ("model.embed_tokens", "model.norm", "lm_head")
    return {f"{name}.weight": Tensor("F32", (4, 4)) for name in (*outside, *names)}


DENSE = tensors(*modules(*ATTENTION, *MLP, "input_layernorm"))
ROUTED = tensors(*modules(*ATTENTION, "mlp.gate", *EXPERTS), *modules(*ATTENTION, layers=[LAYERS]))
"""With a layer that predicts a second token."""
VISION = tensors(
    *modules(*ATTENTION, layers=range(7), stack="vision_tower.encoder.layers"),
    *modules(*ATTENTION, *MLP, stack="language_model.model.layers"),
)


def write_adapter(folder: Path, names: Iterable[str], config: Mapping[str, Any]) -> Path:
    matrices = [f"{name}.lora_{matrix}.weight" for name in names for matrix in "AB"]
    found = {f"base_model.model.{name}": np.zeros((2, 2), np.float32) for name in matrices}
    return write_tensors(folder, found, config)


def write_tensors(folder: Path, found: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    save_file(dict(found), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(orjson.dumps({"peft_type": "LORA", "r": 2, **config}))
    return folder


WHOLE: dict[str, tuple[Tensors, list[str], dict[str, Any]]] = {
    "suffixes": (DENSE, modules(*ATTENTION), {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "whole names": (DENSE, modules("mlp.up_proj", layers=[2]), {"target_modules": ["model.layers.2.mlp.up_proj"]}),
    "a pattern": (DENSE, modules("mlp.up_proj", layers=[1, 3]), {"target_modules": r".*\.(1|3)\.mlp\.up_proj"}),
    "all linear": (DENSE, modules(*ATTENTION, *MLP), {"target_modules": "all-linear"}),
    "the head": (DENSE, [*modules("mlp.up_proj"), "lm_head"], {"target_modules": ["up_proj", "lm_head"]}),
    "some layers": (
        DENSE,
        modules("mlp.up_proj", layers=[0, 2]),
        {"target_modules": ["up_proj"], "layers_to_transform": [0, 2]},
    ),
    "one layer, found by a pattern": (
        DENSE,
        modules("mlp.up_proj", layers=[3]),
        {"target_modules": ["up_proj"], "layers_to_transform": 3, "layers_pattern": "layers"},
    ),
    "excluded suffixes": (
        DENSE,
        modules("self_attn.q_proj"),
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    ),
    "an excluded pattern": (
        DENSE,
        modules("self_attn.q_proj", layers=range(3)),
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.3\..*"},
    ),
    "experts that transformers fuses": (
        ROUTED,
        modules(*ATTENTION),
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
    ),
    "experts one by one": (ROUTED, modules(*EXPERTS), {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "fused experts": (
        ROUTED,
        [*modules("mlp.experts"), *modules("mlp.experts.base_layer")],
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "a language model alone": (
        VISION,
        modules("self_attn.q_proj"),
        {"target_modules": ["q_proj"]},
    ),
    "another name for the stack of layers": (
        VISION,
        modules("mlp.up_proj", layers=[0, 1], stack="model.language_model.layers"),
        {"target_modules": r"model\.language_model\.layers\.(0|1)\.mlp\.up_proj"},
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_adapter_is_accepted(case: str, tmp_path: Path) -> None:
    model, adapted, config = WHOLE[case]
    check_adapter(write_adapter(tmp_path, adapted, config), model, LAYERS)


@pytest.mark.parametrize("case", [name for name, (_, adapted, _) in WHOLE.items() if len(adapted) > 1])
def test_an_adapter_that_lacks_any_one_module_is_refused(case: str, tmp_path: Path) -> None:
    model, adapted, config = WHOLE[case]
    for lacking in adapted:
        rest = [name for name in adapted if name.replace(".base_layer", "") != lacking.replace(".base_layer", "")]
        with pytest.raises(WeightsError, match=f"lacks '{lacking.removesuffix('.base_layer')}', which its conf"):
            check_adapter(write_adapter(tmp_path, rest, config), model, LAYERS)


def test_an_adapter_that_lacks_two_layers_is_refused_by_their_names(tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "v_proj"]}
    folder = write_adapter(tmp_path, modules("self_attn.q_proj", "self_attn.v_proj", layers=[0, 1]), config)
    with pytest.raises(WeightsError) as refused:
        check_adapter(folder, DENSE, LAYERS)
    assert str(refused.value) == (
        f"adapter {str(folder)!r} lacks 'model.layers.2.self_attn.q_proj', 'model.layers.2.self_attn.v_proj', "
        "'model.layers.3.self_attn.q_proj' and 1 more, which its configuration names: publish it with the tensors of "
        "all layers"
    )


def test_a_module_that_is_adapted_nowhere_is_missed_where_the_configuration_names_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, modules("self_attn.q_proj"), {"target_modules": ["q_proj", "v_proj"]})
    with pytest.raises(WeightsError, match=r"lacks 'model.layers.0.self_attn.v_proj'.* and 1 more"):
        check_adapter(folder, DENSE, LAYERS)


def test_a_module_that_is_saved_whole_needs_no_matrices(tmp_path: Path) -> None:
    pairs = [f"{name}.lora_{matrix}.weight" for name in modules("mlp.up_proj") for matrix in "AB"]
    found = {f"base_model.model.{name}": np.zeros((2, 2), np.float32) for name in [*pairs, "lm_head.weight"]}
    config = {"target_modules": ["up_proj", "lm_head"], "modules_to_save": ["lm_head"]}
    check_adapter(write_tensors(tmp_path, found, config), DENSE, LAYERS)


def test_half_a_pair_and_an_adapter_without_tensors_are_refused(tmp_path: Path) -> None:
    config = {"target_modules": ["up_proj"]}
    half = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(WeightsError, match=r"only one of the matrices A and B of 'model.layers.0.mlp.up_proj'"):
        check_adapter(write_tensors(tmp_path, half, config), DENSE, LAYERS)
    with pytest.raises(WeightsError, match="lacks all modules"):
        check_adapter(write_adapter(tmp_path, [], config), DENSE, LAYERS)


@pytest.mark.parametrize("config", [b"", b"[]", b'{"target_modules": 3}', b'{"target_modules": "("}'])
def test_a_configuration_that_cannot_be_read_is_refused(config: bytes, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, modules("mlp.up_proj"), {})
    (folder / "adapter_config.json").write_bytes(config)
    with pytest.raises(WeightsError, match=r"adapter_config.json' cannot be read"):
        check_adapter(folder, DENSE, LAYERS)
