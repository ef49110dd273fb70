"""Weights are compared with the model they are for, by name, shape and dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Tensor
from rollq.workers.engines.tensors import DTYPES, check_tensors, read_tensors, torch_tensor

HAS = sorted(name for name in DTYPES if hasattr(torch, name))


@pytest.mark.parametrize("name", HAS)
def test_a_dtype_of_torch_has_the_name_that_safetensors_writes(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3).to(getattr(torch, name))}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path) == {"w": torch_tensor(name, (2, 3))}


@pytest.mark.parametrize("found", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("expected", ["float32", "bfloat16", "float16"])
def test_floats_replace_floats(found: str, expected: str) -> None:
    check_tensors({"w": torch_tensor(found, (2,))}, {"w": torch_tensor(expected, (2,))}, "folder")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("int8", "bfloat16"),
        ("float32", "int8"),
        ("uint8", "int8"),
        ("int32", "int64"),
        ("float8_e4m3fn", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("of a later torch", "float32"),
    ],
)
def test_other_dtypes_replace_only_themselves(found: str, expected: str) -> None:
    theirs, ours = {"v": Tensor("F32", ()), "w": torch_tensor(found, (2,))}, {"w": torch_tensor(expected, (2,))}
    ours["v"] = Tensor("F32", ())
    with pytest.raises(WeightsError) as refused:
        check_tensors(theirs, ours, "weight broadcast 3")
    assert str(refused.value) == (
        f"weights 'weight broadcast 3' belong to another model: 'w' has dtype {theirs['w'].dtype}, "
        f"the model's is {ours['w'].dtype}"
    )
    check_tensors(theirs, theirs, "folder")
