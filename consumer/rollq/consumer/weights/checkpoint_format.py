"""Weights under their names and shapes in files: gathered from all ranks, and converted.

transformers fuses, renames and transposes tensors when it loads a model: the experts of a layer, one tensor each in
files, are one tensor in memory. Engines expect the form of files, so models are converted before they are published.

Invariant: each rank of a sharded model holds its shards, and the parts of one file tensor at a time. All ranks gather
the same tensors in the same order, even if rank 0 fails to convert or write them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.probe import Probe
from rollq.consumer.weights.tensor_stream import TensorStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def state_dict_stream(
    tensors: Mapping[str, Any], *, dtype: str | None = None, probe: Probe | None = None
) -> TensorStream:
    """A state dict's tensors, possibly sharded, rounded to `dtype` if it is set. Tensors that share memory appear
    once."""
    once = {name: tensor.detach() for name, tensor in shared_once(tensors).items()}
    described = {name: on_meta(tensor, dtype) for name, tensor in once.items()}
    gathered = gather(once, described, once)
    return TensorStream(described, _received(gathered, once), gathered, probe)


def model_stream(model: Any, *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
    """A model's tensors, possibly sharded, named and divided as by `save_pretrained`.

    With `dtype`, floating-point numbers are rounded to it, except in tensors that transformers keeps in float32.
    """
    tensors, rounded, parts = model_parts(model, dtype)
    gathered = gather(tensors, rounded, [name for part in parts for name in part.sources])

    def converted() -> Iterator[tuple[str, Any]]:
        for part in parts:
            yield from part.convert(dict(_received(islice(gathered, len(part.sources)), tensors))).items()

    described = {name: tensor for part in parts for name, tensor in part.described.items()}
    return TensorStream(described, converted(), gathered, probe)


def to_checkpoint_format(model: "PreTrainedModel", state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of `model` to the names and shapes that `model.save_pretrained` writes.

    `state_dict` holds whole tensors under the names of `model.state_dict()`, as gathered from FSDP or DeepSpeed; the
    parameters of `model` itself are not read. Fused experts are split, and tied tensors are kept once, even if they no
    longer share memory. Dtypes and devices stay the same; tensors that are not converted are not copied. A state dict
    without fused or tied tensors is returned unchanged. Raises `WeightsError` for sharded tensors, and for tied tensors
    that differ.
    """
    check_whole(state_dict)
    return _converted(model, untied(model, state_dict))


def _equal(tensor: Any, other: Any) -> bool:
    """Whether tensors are equal. Ranks that hold parts of them agree on the result. All ranks call it."""
    return bool(tensor.equal(other))


def untied(
    model: "PreTrainedModel", state_dict: Mapping[str, Any], is_equal: Callable[[Any, Any], bool] = _equal
) -> dict[str, Any]:
    """The tensors of a state dict that belong in files, with tied tensors only once.

    Raises `WeightsError` for tied tensors that differ, and if only one is sharded.
    """
    tensors = {name: tensor for name, tensor in state_dict.items() if name not in (model._keys_to_ignore_on_save or ())}
    for name, source in model.all_tied_weights_keys.items():
        tensor = tensors.pop(name, None)
        if tensor is None:
            continue
        other = tensors.setdefault(source, tensor)
        _check_sharded(name, tensor, source, other)
        if not is_equal(other, tensor):
            raise WeightsError(f"{name!r} differs from {source!r}, to which the model ties it: gather both again")
    return tensors


def _check_sharded(name: str, tensor: Any, source: str, other: Any) -> None:
    """Raise `WeightsError` if only one of two tied tensors is sharded."""
    if is_sharded(tensor) != is_sharded(other):
        whole, sharded = (source, name) if is_sharded(tensor) else (name, source)
        raise WeightsError(f"{sharded!r} is sharded and {whole!r}, which the model ties to it, is not: shard both")


class Part(NamedTuple):
    """Model tensors that can be converted to file tensors without the rest of the model.

    `sources` holds their names in memory. `described` has the files' tensors, on torch's meta device, by name.
    """

    model: "PreTrainedModel"
    sources: tuple[str, ...]
    described: Mapping[str, Any]
    is_kept: bool  # whether the tensor stays unchanged, except perhaps its name

    def convert(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the files' tensors from the tensors in memory."""
        if self.is_kept:
            return dict(zip(self.described, tensors.values(), strict=True))
        return _converted(self.model, tensors)


class ModelParts(NamedTuple):
    """A model's `tensors` in memory, which may be sharded; their `rounded` forms on torch's meta device; and the
    `parts` that make its files. `tensors` and `rounded` have the names in memory."""

    tensors: Mapping[str, Any]
    rounded: Mapping[str, Any]
    parts: Sequence[Part]


def model_parts(model: "PreTrainedModel", dtype: str | None) -> ModelParts:
    """The parts of a model whose floating-point numbers are rounded to `dtype`, if it is set; see `kept_precise`.

    All ranks of a sharded model call it. Raises `WeightsError` for tied tensors that differ.
    """
    tensors = untied(model, _once(model))
    precise = kept_precise(model, dtype)
    dtypes = {name: None if any(part in name for part in precise) else dtype for name in tensors}
    rounded = {name: on_meta(tensor, dtypes[name]) for name, tensor in tensors.items()}
    return ModelParts(tensors, rounded, divide_model(model, rounded))


def _once(model: "PreTrainedModel") -> dict[str, Any]:
    """The state dict of a model, with each parameter under its first name only."""
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    repeated = set(every) - {name for name, _ in model.named_parameters()}
    return shared_once({name: tensor for name, tensor in model.state_dict().items() if name not in repeated})


def kept_precise(model: "PreTrainedModel", dtype: str | None) -> set[str]:
    """Name fragments of tensors that transformers loads in float32 even if it loads the model in `dtype`."""
    strict = set(model._keep_in_fp32_modules_strict or ()) if dtype in ("bfloat16", "float16") else set()
    return strict | set(model._keep_in_fp32_modules or ()) if dtype == "float16" else strict


def divide_model(model: "PreTrainedModel", described: Mapping[str, Any]) -> list[Part]:
    """Divide tensors of `model`, on torch's meta device and by their names in memory, into the smallest parts.

    Most tensors are separate parts. Others are converted with the tensors of the same layer, or all together.
    """
    whole = _converted(model, described)
    names = {id(tensor): name for name, tensor in whole.items()}
    plain = {name: names[id(tensor)] for name, tensor in described.items() if id(tensor) in names}
    parts = [Part(model, (name,), {converted: described[name]}, True) for name, converted in plain.items()]
    sources = [name for name in described if name not in plain]
    expected = shapes_of({name: whole[name] for name in whole.keys() - set(plain.values())})
    return parts + _smallest_parts(model, described, sources, expected)


def _smallest_parts(
    model: "PreTrainedModel", described: Mapping[str, Any], sources: Sequence[str], expected: Shapes
) -> list[Part]:
    """Convert the sources in the smallest parts that give the `expected` names and shapes."""
    # From the smallest parts to the largest: one tensor, a layer's tensors, all. Too small a part lacks tensors that
    # transformers fuses: the conversion fails, or gives other shapes than for the whole model.
    for key in (str, _layer):
        try:
            converted = _converted_parts(model, described, sources, key)
        except Exception:  # noqa: BLE001 - an operation of transformers that lacks a tensor may raise anything
            continue
        if shapes_of({name: tensor for part in converted for name, tensor in part.described.items()}) == expected:
            return converted
    return _converted_parts(model, described, sources, lambda _: "")


def _converted_parts(
    model: "PreTrainedModel", described: Mapping[str, Any], sources: Iterable[str], key: Callable[[str], str]
) -> list[Part]:
    """Convert the sources that share a key together."""
    groups: dict[str, list[str]] = {}
    for name in sources:
        groups.setdefault(key(name), []).append(name)
    return [_converted_part(model, described, group) for group in groups.values()]


def _converted_part(model: "PreTrainedModel", described: Mapping[str, Any], sources: list[str]) -> Part:
    return Part(model, tuple(sources), _converted(model, {name: described[name] for name in sources}), False)


def _layer(name: str) -> str:
    """The name of a tensor's layer: the text up to the first number."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else name


def _converted(model: "PreTrainedModel", tensors: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return converted


def gather(tensors: Mapping[str, Any], described: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each named tensor whole. All ranks iterate to the end.

    Tensors are rounded to the `described` dtypes before they travel between ranks.
    """
    for name in names:
        yield (
            name,
            _whole(tensors[name].detach().to(described[name].dtype)),
        )  # without a variable that keeps it in this frame


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _received(gathered: Iterable[tuple[str, Any]], tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The gathered tensors of `tensors`, on rank 0. Tensors that were sharded are on the CPU."""
    return ((name, _arrived(name, whole, tensors[name])) for name, whole in gathered)


def _arrived(name: str, whole: Any, tensor: Any) -> Any:
    """A gathered tensor for rank 0. Raises `WeightsError` if rounding to float16 has made it infinite."""
    import torch

    if whole.dtype == torch.float16 != tensor.dtype and whole.isinf().any():
        raise WeightsError(
            f'tensor {name!r} has values beyond 65504, the largest float16 value: set publish_dtype to "bfloat16"'
        )
    return whole.cpu() if is_sharded(tensor) else whole


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """The shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor: each rank holds a part, as with FSDP or tensor parallelism."""
    return hasattr(tensor, "full_tensor")


def check_whole(state_dict: Mapping[str, Any]) -> None:
    """Raise `WeightsError` for a sharded tensor, and for anything but a tensor."""
    for name, tensor in state_dict.items():
        if not hasattr(tensor, "data_ptr"):
            raise WeightsError(f"{name!r} has the type {type(tensor).__name__}: must be a torch tensor")
        if is_sharded(tensor):
            raise WeightsError(
                f"tensor {name!r} is sharded over ranks: publish the model itself, on all ranks; or gather a full "
                "state dict on all ranks, and publish to_checkpoint_format(model, state_dict)"
            )


def shared_once(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the first of tensors that share memory (tied embeddings), as `save_pretrained` does."""
    seen: set[tuple[int, int]] = set()
    once: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            identity = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
        once[name] = tensor
    return once


def on_meta(tensor: Any, dtype: str | None) -> Any:
    """A tensor's form in files, on torch's meta device. With `dtype`, floating-point numbers are rounded to it."""
    import torch

    return torch.empty(tensor.shape, dtype=_dtype_in_file(tensor, dtype), device="meta")


def _dtype_in_file(tensor: Any, dtype: str | None) -> Any:
    import torch

    if dtype is None or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor.dtype
    return getattr(torch, dtype)
