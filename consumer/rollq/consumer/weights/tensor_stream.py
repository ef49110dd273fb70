"""The tensors of weights for writing: whole, one after another, under their names in files.

Invariant: a rank of a sharded model holds its own shards, and the parts of one tensor of the files at a time. All ranks
gather the same tensors in the same order, even if rank 0 fails to convert or write them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, Self

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.probe import Probe
from rollq.consumer.weights.checkpoint_format import model_parts
from rollq.consumer.weights.tensors import is_sharded, on_meta, shapes_of, shared_once


class TensorStream:
    """Named tensors to write. They exist one after another.

    `described` has the names, dtypes and shapes of all tensors, on torch's meta device. `size_bytes` is their total
    size. `tensors` are made from `gathered`, an iterator over the tensors that all ranks gather. `probe` is the
    weights' probe, if any. Iterate once, on rank 0. If ranks wait for each other, all of them use the stream as a
    context manager: at its end, the remaining tensors are gathered, even after an error, which is then raised.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        tensors: Iterator[tuple[str, Any]],
        gathered: Iterable[Any] = (),
        probe: Probe | None = None,
    ) -> None:
        self.described = described
        self.shapes = shapes_of(described)
        self.size_bytes = sum(tensor.nbytes for tensor in described.values())
        self.probe = probe
        self._tensors = tensors
        self._gathered = gathered

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each name and its whole tensor.

        Raises `WeightsError` for a tensor that differs from its description, is missing, or comes twice.
        """
        awaited = set(self.described)
        for name, tensor in self._tensors:
            if name not in awaited:
                problem = "came twice" if name in self.described else "came, and was not announced"
                raise WeightsError(f"tensor {name!r} {problem}")
            came, expected = ((each.dtype, tuple(each.shape)) for each in (tensor, self.described[name]))
            if came != expected:
                raise WeightsError(
                    f"tensor {name!r} has dtype {came[0]} and shape {came[1]}: {expected[0]} and {expected[1]} were "
                    "announced"
                )
            awaited.remove(name)
            yield name, tensor
            del tensor  # before the next one is gathered
        if awaited:
            raise WeightsError(f"tensor {min(awaited)!r} was announced by transformers, and did not come")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception) if kind else nullcontext():  # the first error is the cause
            self.take_part()

    def take_part(self) -> None:
        """Gather the remaining tensors for the ranks that wait for this rank."""
        deque(self._gathered, maxlen=0)  # the variable of a loop would keep a tensor during the next gather


def tensor_stream(tensors: Mapping[str, Any], *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
    """The tensors of a state dict, which may be sharded: unchanged, and tensors that share memory once."""
    once = {name: tensor.detach() for name, tensor in shared_once(tensors).items()}
    described = {name: on_meta(tensor, dtype) for name, tensor in once.items()}
    gathered = gather(once, described, once)
    return TensorStream(described, _received(gathered, once), gathered, probe)


def model_stream(model: Any, *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
    """The tensors of a model, which may be sharded, by the names and the division of `save_pretrained`.

    With `dtype`, floating-point numbers are rounded to it, except in tensors that transformers keeps in float32.
    """
    tensors, rounded, parts = model_parts(model, dtype)
    gathered = gather(tensors, rounded, [name for part in parts for name in part.sources])

    def converted() -> Iterator[tuple[str, Any]]:
        for part in parts:
            yield from part.convert(dict(_received(islice(gathered, len(part.sources)), tensors))).items()

    described = {name: tensor for part in parts for name, tensor in part.described.items()}
    return TensorStream(described, converted(), gathered, probe)


def gather(tensors: Mapping[str, Any], described: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each of the named tensors, whole. All ranks iterate to the end.

    They are rounded to the `described` dtypes before they travel between ranks.
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
            f'tensor {name!r} has values beyond 65504, the largest of float16: set publish_dtype to "bfloat16"'
        )
    return whole.cpu() if is_sharded(tensor) else whole
