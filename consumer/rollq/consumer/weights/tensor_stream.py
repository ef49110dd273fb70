"""A model's tensors on their way to files: written whole, one after another, under their names in files."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Self

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.probe import Probe


class TensorStream:
    """Named tensors to write. Sharded tensors are gathered one file tensor at a time.

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
        self.size_bytes = sum(tensor.nbytes for tensor in described.values())
        self.probe = probe
        self._tensors = tensors
        self._gathered = gathered

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each name and its whole tensor.

        Raises `WeightsError` for a tensor that differs from its description, is missing, or is repeated.
        """
        awaited = set(self.described)
        for name, tensor in self._tensors:
            if name not in awaited:
                problem = "came twice" if name in self.described else "was not announced"
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
            raise WeightsError(f"tensor {min(awaited)!r} was announced by transformers, but is missing")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception) if kind else nullcontext():  # the first error is the cause
            self.take_part()

    def take_part(self) -> None:
        """Gather the remaining tensors for the ranks that wait for this rank."""
        deque(self._gathered, maxlen=0)  # the variable of a loop would keep a tensor during the next gather
