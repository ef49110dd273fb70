"""Reads which tensors a folder of safetensors holds, without loading them, and compares them with a model's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from safetensors import SafetensorError, safe_open

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import ADAPTER_CONFIG, LM_HEAD, Tensor, weight_files
from rollq.workers.tokenizers.hugging_face import CONFIG_FILE

EMBEDDING = "embed_tokens.weight"
"""The end of the embedding's name. A tied embedding also serves as the head."""
Tensors = Mapping[str, Tensor]
"""Name -> safetensors' name of the dtype (`BF16`), and shape."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that may replace each other, since engines convert them. Other dtypes cannot be converted."""
DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""torch's dtype names -> safetensors'."""


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a LoRA adapter in PEFT's format."""
    return (folder / ADAPTER_CONFIG).exists()


def read_tensors(folder: Path) -> Tensors:
    """Return name -> dtype and shape for all tensors of the model or adapter in `folder`. Detects truncated files.

    Raises `WeightsError` when a file is missing or cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_slice(name)
                    tensors[name] = Tensor(tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read weights {str(path)!r}: {error}; publish them again") from error
    return tensors


def torch_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The description of a tensor, from torch's name of its dtype, such as `bfloat16`."""
    return Tensor(DTYPES.get(dtype, dtype), shape)


def check_tensors(given: Tensors, expected: Tensors, where: str, optional: Collection[str] = ()) -> None:
    """Raise `WeightsError` if the `given` tensors at `where` differ from the `expected` ones in name, shape or dtype.

    The tensors named in `optional` may be absent on either side. Floats of 16 to 64 bits may replace each other.
    """
    missing = sorted(expected.keys() - given.keys() - set(optional))
    unknown = sorted(given.keys() - expected.keys() - set(optional))
    if missing or unknown:
        raise WeightsError(
            f"weights {where!r} belong to another model: they lack {few(missing)} and have unknown {few(unknown)}"
        )
    for name in sorted(expected.keys() & given.keys()):
        _check_tensor(name, given[name], expected[name], where)


def _check_tensor(name: str, given: Tensor, expected: Tensor, where: str) -> None:
    if given.shape != expected.shape:
        raise WeightsError(
            f"weights {where!r} belong to another model: {name!r} has shape {given.shape}, "
            f"the model's is {expected.shape}"
        )
    if given.dtype != expected.dtype and not {given.dtype, expected.dtype} <= FLOATS:
        raise WeightsError(
            f"weights {where!r} belong to another model: {name!r} has dtype {given.dtype}, "
            f"the model's is {expected.dtype}"
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The `tensors` of the served model. `copies` names the tensors that are also loaded under a second name: the
    embedding as the head, if the two are tied."""

    tensors: Tensors
    copies: Mapping[str, str]

    def check(self, folder: Path) -> None:
        """Raise `WeightsError` unless `folder` holds weights of this model."""
        if is_adapter(folder):
            raise WeightsError(f"weights {str(folder)!r} are a LoRA adapter: engine 'vllm' serves them")
        check_tensors(read_tensors(folder), self.tensors, str(folder), optional=self.copies.values())


def read_model(folder: Path) -> ServedModel:
    """The model in `folder`. Raises `WeightsError` if `folder` holds no model."""
    tensors = read_tensors(folder)
    try:
        config = orjson.loads((folder / CONFIG_FILE).read_bytes())
        default = LM_HEAD not in tensors  # transformers omits settings with default values
        tied = config.get("text_config", config).get("tie_word_embeddings", config.get("tie_word_embeddings", default))
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        raise WeightsError(f"the model in {str(folder)!r} has no {CONFIG_FILE} that can be read: {error}") from error
    return ServedModel(tensors, tied_heads(tensors) if tied else {})


def tied_heads(names: Collection[str]) -> dict[str, str]:
    """Embedding -> head, by name, among the tensors `names` of a model whose embedding and head are tied."""
    return {name: LM_HEAD for name in names if name.endswith(EMBEDDING)}


def few(names: list[str]) -> str:
    """The first names of a list, for a message."""
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
