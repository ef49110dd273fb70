"""Weights to publish. Only this module inspects the user's weights.

Later stages take a `Folder`, whose files are stored unchanged, or a `TensorStream`, which is written.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Verify, describe_folder
from rollq.buffer.weights.probe import Probe, tolerance_of
from rollq.consumer.weights.checkpoint_format import Weights
from rollq.consumer.weights.tensor_stream import TensorStream, model_stream, tensor_stream
from rollq.consumer.weights.tensors import Shapes, check_whole, is_sharded, shapes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a model or of a LoRA adapter, and the probe that the user passed with them."""

    path: Path
    probe: Probe | None = None

    @property
    def shapes(self) -> Shapes | None:
        """The shapes of a model's tensors, by name; None for an adapter. Raises `WeightsError` for unreadable files."""
        manifest = describe_folder(self.path, Verify.SIZES)
        return shapes_of(manifest.tensors) if manifest.kind == "full" else None


Source: TypeAlias = Folder | TensorStream


def weights_source(weights: Weights, probe: Probe | None = None, *, dtype: str | None = None) -> Source:
    """The source of weights, with their probe: a model's probe is computed.

    With `dtype`, floating-point numbers of models and state dicts are rounded to it, and the probe allows for that; a
    folder stays unchanged. All ranks call it for a model that is sharded over them. Raises `WeightsError` for an object
    that is not weights, and for sharded tensors outside a sharded model.
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
    return model_stream(weights, dtype=dtype, probe=_rounded(probe or _probe_of(weights), dtype))


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


def _probe_of(model: Any) -> Probe:
    from rollq.consumer.weights.probe import probe_of  # needs torch

    return probe_of(model)


def _rounded(probe: Probe | None, dtype: str | None) -> Probe | None:
    """The probe of weights that are rounded to `dtype`: it allows engines as much deviation as with that dtype.

    Sums only fit weights that are rounded to bfloat16, so float16 drops them.
    """
    if probe is None or dtype is None:
        return probe
    sums = {} if dtype == "float16" else probe.sums
    return replace(probe, dtype=max(probe.dtype, dtype, key=tolerance_of), sums=sums)
