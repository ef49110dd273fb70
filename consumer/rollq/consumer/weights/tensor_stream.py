"""The tensors of weights as they are written: whole, one after the other, under the names that they have in files.

Invariant: of a model that is sharded over ranks, a rank holds the parts of one tensor of its files at a time, besides
its own shards. All ranks gather the same tensors in the same order, also where rank 0 fails to convert or write them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeAlias

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.probe import Probe, tolerance_of
from rollq.consumer.weights.checkpoint_format import (
    Weights,
    check_whole,
    divide_model,
    is_model,
    is_sharded,
    untied,
)


class TensorStream:
    """Named tensors to write, which exist one after the other.

    `described` has them all, on torch's meta device: their names, dtypes and shapes. `tensors` are made of `gathered`,
    an iterator over what all ranks gather. Iterate once, on rank 0. Where ranks wait for each other, all of them use
    the stream as a context manager: at its end, what is left is gathered, also after an error, which is raised then.
    """

    def __init__(
        self, described: Mapping[str, Any], tensors: Iterator[tuple[str, Any]], gathered: Iterable[Any] = ()
    ) -> None:
        self.described = described
        self._tensors = tensors
        self._gathered = gathered

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each name and its whole tensor."""
        return self._tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception) if kind else nullcontext():  # the first error is the one to know
            self.take_part()

    def take_part(self) -> None:
        """Gather what is left, for the ranks that wait for this one."""
        deque(self._gathered, maxlen=0)  # no loop, whose variable would keep a tensor while the next one comes

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.described.values())


Content: TypeAlias = Path | TensorStream
"""Weights as they are published: those of a folder, or tensors to write."""


@contextmanager
def gathering(
    weights: Weights, probe: Probe | None, *, rank: int, dtype: str | None = None
) -> Iterator[tuple[Content, Probe | None]]:
    """Yield weights as `prepare` does, also those of a sharded model, on rank 0; all ranks enter.

    Other ranks take part in the gathering before they get anything, which they are not to use.
    """
    if not (is_model(weights) and any(map(is_sharded, weights.parameters()))):
        yield (Path(), None) if rank != 0 else prepare(weights, probe, dtype=dtype)
        return
    probe = probe or _probe_of(weights)
    with model_stream(weights, dtype=dtype) as stream:
        if rank != 0:
            stream.take_part()
        yield stream, _rounded(probe, dtype)


def prepare(
    weights: "Weights | TensorStream", probe: Probe | None, *, dtype: str | None = None
) -> tuple[Content, Probe | None]:
    """The content of weights of one process, and their probe: that of a model is computed.

    With `dtype`, floating-point numbers of models and state dicts are rounded to it, and the probe allows for that; a
    folder stays as it is. Raises `WeightsError` for what is not weights, and for sharded tensors.
    """
    if isinstance(weights, Path | TensorStream):
        return weights, probe
    if isinstance(weights, Mapping):
        check_whole(weights)
        return tensor_stream(weights, dtype=dtype), _rounded(probe, dtype)
    if not is_model(weights):
        raise WeightsError(
            f"cannot publish a {type(weights).__name__}: publish a transformers.PreTrainedModel (the one inside, if it "
            "is wrapped), a state dict, or the Path of a folder"
        )
    check_whole(weights.state_dict())  # before the forward pass of a probe, which would wait for other ranks
    return model_stream(weights, dtype=dtype), _rounded(probe or _probe_of(weights), dtype)


def tensor_stream(tensors: Mapping[str, Any], *, dtype: str | None = None) -> TensorStream:
    """The tensors of a state dict, which may be sharded: as they are, and those that share memory once."""
    kept = {name: tensor.detach() for name, tensor in shared_once(tensors).items()}
    described = {name: _described(tensor, dtype) for name, tensor in kept.items()}
    gathered = gather(kept, described, kept)
    return TensorStream(described, _received(gathered, kept), gathered)


def model_stream(model: Any, *, dtype: str | None = None) -> TensorStream:
    """The tensors of a model, which may be sharded, as `save_pretrained` names and divides them.

    With `dtype`, floating-point numbers are rounded to it, except in tensors that transformers keeps in float32.
    """
    kept = untied(model, _once(model), _is_equal)
    precise = kept_precise(model, dtype)
    dtypes = {name: None if any(part in name for part in precise) else dtype for name in kept}
    rounded = {name: _described(tensor, dtypes[name]) for name, tensor in kept.items()}
    parts = divide_model(model, rounded)
    gathered = gather(kept, rounded, [name for part in parts for name in part.sources])

    def tensors() -> Iterator[tuple[str, Any]]:
        for part in parts:
            yield from part.convert(dict(_received(islice(gathered, len(part.sources)), kept))).items()

    described = {name: tensor for part in parts for name, tensor in part.described.items()}
    return TensorStream(described, tensors(), gathered)


def gather(tensors: Mapping[str, Any], described: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each of the named tensors, whole, on all ranks, which all iterate to the end.

    They are rounded to the dtypes that are `described`, before they travel between ranks.
    """
    for name in names:
        yield name, _whole(tensors[name].detach().to(described[name].dtype))  # no variable keeps it in this frame


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _received(gathered: Iterable[tuple[str, Any]], tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors that were gathered of `tensors`, on rank 0: those that were sharded are on the CPU."""
    return ((name, _arrived(name, whole, tensors[name])) for name, whole in gathered)


def _arrived(name: str, whole: Any, tensor: Any) -> Any:
    """A gathered tensor for rank 0. Raises `WeightsError` if rounding to float16 has made it infinite."""
    import torch

    if whole.dtype == torch.float16 != tensor.dtype and whole.isinf().any():
        raise WeightsError(
            f'tensor {name!r} has values beyond 65504, the largest of float16: set publish_dtype to "bfloat16"'
        )
    return whole.cpu() if is_sharded(tensor) else whole


def shared_once(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the first of tensors that share memory (tied embeddings), as `save_pretrained` does."""
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            identity = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
        kept[name] = tensor
    return kept


def kept_precise(model: Any, dtype: str | None) -> set[str]:
    """Parts of the names of tensors that transformers loads in float32 although a model is loaded in `dtype`."""
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype in ("bfloat16", "float16") else set()
    return kept | set(model._keep_in_fp32_modules or ()) if dtype == "float16" else kept


def _once(model: Any) -> dict[str, Any]:
    """The state dict of a model, with each parameter under its first name only."""
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    repeated = set(every) - {name for name, _ in model.named_parameters()}
    return shared_once({name: tensor for name, tensor in model.state_dict().items() if name not in repeated})


def _is_equal(tensor: Any, other: Any) -> bool:
    """Whether tensors are equal; ranks that hold parts of them agree on it. All ranks call it."""
    return bool(tensor.equal(other))


def _described(tensor: Any, dtype: str | None) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=_dtype_in_file(tensor, dtype), device="meta")


def _dtype_in_file(tensor: Any, dtype: str | None) -> Any:
    import torch

    if dtype is None or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor.dtype
    return getattr(torch, dtype)


def _probe_of(model: Any) -> Probe:
    from rollq.consumer.weights.probe import probe_of  # needs torch

    return probe_of(model)


def _rounded(probe: Probe | None, dtype: str | None) -> Probe | None:
    """The probe of weights that are rounded to `dtype`: engines may be off by as much as with that dtype.

    Sums stay those of bfloat16, which float16 does not round to.
    """
    if probe is None or dtype is None:
        return probe
    sums = {} if dtype == "float16" else probe.sums
    return replace(probe, dtype=max(probe.dtype, dtype, key=tolerance_of), sums=sums)
