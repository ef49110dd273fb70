"""Weights to publish or to save, with their probe. Only this module inspects the user's weights.

Later stages take a `Folder`, whose files are stored unchanged, or a `TensorStream`, whose tensors are written whole,
one after another, under their names in files.

Invariant: each rank of a sharded model holds its shards, and the parts of one file tensor at a time. All ranks gather
the same tensors in the same order, even if rank 0 fails to convert or write them.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeGuard

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Verify, describe_folder
from rollq.buffer.weights.probe import Probe, probe_prompts, tolerance_of
from rollq.consumer.weights.checkpoint_format import (
    Shapes,
    Weights,
    check_whole,
    is_sharded,
    model_parts,
    on_meta,
    shapes_of,
    shared_once,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's or LoRA adapter's files, and the probe that the user passed with them."""

    path: Path
    probe: Probe | None = None

    @property
    def shapes(self) -> Shapes | None:
        """The shapes of a model's tensors, by name; None for an adapter. Raises `WeightsError` for unreadable files."""
        manifest = describe_folder(self.path, Verify.SIZES)
        return shapes_of(manifest.tensors) if manifest.kind == "full" else None


class TensorStream:
    """Named tensors to write. Only one exists at a time.

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


Source: TypeAlias = Folder | TensorStream


def weights_source(weights: Weights, probe: Probe | None = None, *, dtype: str | None = None) -> Source:
    """The source of weights, with their probe; a model's probe is computed.

    With `dtype`, floating-point numbers of models and state dicts are rounded to it, and the probe allows for that; a
    folder stays unchanged. All ranks of a sharded model call it. Raises `WeightsError` for an object that is not
    weights, and for sharded tensors outside a sharded model.
    """
    if isinstance(weights, Path):
        return Folder(weights, probe)
    if isinstance(weights, Mapping):
        rounded = _rounded(probe, dtype)
        check_whole(weights)
        return tensor_stream(weights, dtype=dtype, probe=rounded)
    if not _is_model(weights):
        raise WeightsError(
            f"cannot publish a {type(weights).__name__}: publish a transformers.PreTrainedModel (the one inside, if it "
            "is wrapped), a state dict, or the Path of a folder"
        )
    if not _is_shared_out(weights):
        check_whole(weights.state_dict())  # before the probe's forward pass, which would wait for other ranks
    return model_stream(weights, dtype=dtype, probe=_rounded(probe or probe_of(weights), dtype))


@contextmanager
def gathering(weights: Weights, probe: Probe | None, *, rank: int, dtype: str | None = None) -> Iterator[Source | None]:
    """Yield the source of weights on rank 0, and None on other ranks. All ranks enter.

    Other ranks first take part in gathering a sharded model.
    """
    if not _is_shared_out(weights):
        yield weights_source(weights, probe, dtype=dtype) if rank == 0 else None
        return
    stream = weights_source(weights, probe, dtype=dtype)
    assert isinstance(stream, TensorStream)
    with stream:
        if rank != 0:
            stream.take_part()
        yield stream if rank == 0 else None


def _is_model(weights: object) -> "TypeGuard[PreTrainedModel]":
    """Whether this is a transformers model."""
    transformers = sys.modules.get("transformers")  # an object of a module that is not imported does not exist
    return transformers is not None and isinstance(weights, transformers.PreTrainedModel)


def _is_shared_out(weights: Weights) -> bool:
    """Whether this is a model whose parameters are sharded over ranks."""
    return _is_model(weights) and any(map(is_sharded, weights.parameters()))


def probe_of(model: Any) -> Probe:
    """The probe of a Hugging Face causal LM with its current weights: a forward pass of about a hundred tokens, and the
    sums of its parameters.

    Raises `WeightsError` if its logprobs are not finite.
    """
    import torch

    from rollq.buffer.weights.bit_sums import bit_sums

    prompts = probe_prompts(model.config.get_text_config().vocab_size)
    ids = torch.tensor([prompt.tolist() for prompt in prompts], device=next(model.parameters()).device)
    training = [module for module in model.modules() if module.training]  # parts may be in `eval` mode on purpose
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].detach()  # a model may turn gradients on
    finally:
        for module in training:
            module.training = True
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not bool(chosen.isfinite().all()):
        raise WeightsError("the model's logprobs are not finite: resume from a checkpoint whose weights are sound")
    return Probe(str(logits.dtype).removeprefix("torch."), prompts, list(chosen.cpu().numpy()), bit_sums(model))


def _rounded(probe: Probe | None, dtype: str | None) -> Probe | None:
    """The probe of weights rounded to `dtype`: engines may deviate as much as with that dtype. Sums fit only weights
    rounded to bfloat16, so they are dropped for float16.
    """
    if probe is None or dtype is None:
        return probe
    sums = {} if dtype == "float16" else probe.sums
    return replace(probe, dtype=max(probe.dtype, dtype, key=tolerance_of), sums=sums)


def tensor_stream(tensors: Mapping[str, Any], *, dtype: str | None = None, probe: Probe | None = None) -> TensorStream:
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
            f'tensor {name!r} has values beyond 65504, the largest of float16: set publish_dtype to "bfloat16"'
        )
    return whole.cpu() if is_sharded(tensor) else whole
