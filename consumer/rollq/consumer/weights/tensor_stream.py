"""The tensors of weights as they are written: whole, one after the other, under the names that they have in files.

Invariant: a rank of a sharded model holds its own shards, and the parts of one tensor of the files at a time. All ranks
gather the same tensors in the same order, even where rank 0 fails to convert or write them.
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
    """Named tensors to write, which exist one after the other.

    `described` has them all, on torch's meta device: their names, dtypes and shapes. `size_bytes`: of all of them.
    `tensors` are made of `gathered`, an iterator over what all ranks gather. `probe`: of the weights, if they have one.
    Iterate once, on rank 0. Where ranks wait for each other, all of them use the stream as a context manager: at its
    end, what is left is gathered, even after an error, which is raised then.
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

        Raises `WeightsError` for a tensor that is not as described, and for one that does not come, or comes twice.
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
        with suppress(Exception) if kind else nullcontext():  # the first error is the one to know
            self.take_part()

    def take_part(self) -> None:
        """Gather what is left, for the ranks that wait for this one."""
        deque(self._gathered, maxlen=0)  # no loop, whose variable would keep a tensor while the next one comes


def tensor_stream(tensors: Mapping[str, Any], *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
    """The tensors of a state dict, which may be sharded: as they are, and those that share memory once."""
    once = {name: tensor.detach() for name, tensor in shared_once(tensors).items()}
    described = {name: on_meta(tensor, dtype) for name, tensor in once.items()}
    gathered = gather(once, described, once)
    return TensorStream(described, _received(gathered, once), gathered, probe)


def model_stream(model: Any, *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
    """The tensors of a model, which may be sharded, as `save_pretrained` names and divides them.

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
