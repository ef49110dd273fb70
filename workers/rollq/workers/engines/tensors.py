"""The tensors in a folder of safetensors, read without loading them, and compared with those of a model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from safetensors import SafetensorError, safe_open

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import ADAPTER_CONFIG, weight_files
from rollq.workers.tokenizers.hugging_face import CONFIG_FILE

LM_HEAD = "lm_head.weight"
"""Optional in weights files where it is tied to the embedding."""
EMBEDDING = "embed_tokens.weight"
"""End of the embedding's name; the embedding is also the head where they are tied."""
Shapes = Mapping[str, tuple[int, ...]]


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a LoRA adapter, as PEFT writes it."""
    return (folder / ADAPTER_CONFIG).exists()


def tensor_shapes(folder: Path) -> Shapes:
    """Name -> shape of all tensors of the model in `folder`. A truncated file does not open.

    Raises `WeightsError` when a file is missing or cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read weights {str(path)!r}: {error}; publish them again") from error
    return shapes


def check_tensors(found: Shapes, expected: Shapes, where: str, optional: Collection[str] = ()) -> None:
    """Raise `WeightsError` unless the tensors found at `where` are those of the model, in name and shape.

    Those of `optional` may be absent on either side.
    """
    missing = sorted(expected.keys() - found.keys() - set(optional))
    unknown = sorted(found.keys() - expected.keys() - set(optional))
    if missing or unknown:
        raise WeightsError(
            f"weights {where!r} are of another model: they lack {_few(missing)} and have unknown {_few(unknown)}"
        )
    for name in expected.keys() & found.keys():
        if found[name] != expected[name]:
            raise WeightsError(
                f"weights {where!r} are of another model: {name!r} has shape {found[name]}, "
                f"the model's is {expected[name]}"
            )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The shapes of the served model's `tensors`, and `copies`: those that are loaded under a second name too, which is
    the embedding as the head where they are tied."""

    tensors: Shapes
    copies: Mapping[str, str]

    def check(self, folder: Path) -> None:
        """Raise `WeightsError` unless `folder` holds weights of this model."""
        if is_adapter(folder):
            raise WeightsError(f"weights {str(folder)!r} are a LoRA adapter: engine 'vllm' serves them")
        check_tensors(tensor_shapes(folder), self.tensors, str(folder), optional=self.copies.values())


def read_model(folder: Path) -> ServedModel:
    """The model in `folder`. Raises `WeightsError` if it holds no model."""
    tensors = tensor_shapes(folder)
    try:
        config = orjson.loads((folder / CONFIG_FILE).read_bytes())
        default = LM_HEAD not in tensors  # transformers omits settings that have their default
        tied = config.get("text_config", config).get("tie_word_embeddings", config.get("tie_word_embeddings", default))
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        raise WeightsError(f"the model in {str(folder)!r} has no {CONFIG_FILE} that can be read: {error}") from error
    return ServedModel(tensors, tied_heads(tensors) if tied else {})


def tied_heads(names: Collection[str]) -> dict[str, str]:
    """The embedding among the tensors of a model whose head is tied to it, and the head's name."""
    return {name: LM_HEAD for name in names if name.endswith(EMBEDDING)}


def _few(names: list[str]) -> str:
    """The first names of a list, for a message."""
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
