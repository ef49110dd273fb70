"""Weights to publish or to save, with their probe. Only this module inspects the user's weights.

Later stages take a `Folder`, whose files are stored unchanged, or a `TensorStream`, whose tensors are written.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Tensor, Verify, describe_folder
from rollq.buffer.weights.probe import Probe, probe_prompts, tolerance_of
from rollq.consumer.weights.checkpoint_format import (
    check_whole,
    is_sharded,
    model_stream,
    state_dict_stream,
)
from rollq.consumer.weights.tensor_stream import TensorStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights: TypeAlias = "Path | Mapping[str, Any] | PreTrainedModel"
"""A folder, a state dict (name -> torch tensor), or a transformers model."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's or LoRA adapter's files, and the probe that the user passed with them."""

    path: Path
    probe: Probe | None = None

    @property
    def described(self) -> Mapping[str, Tensor] | None:
        """The shapes of a model's tensors, by name; None for an adapter. Raises `WeightsError` for unreadable files."""
        manifest = describe_folder(self.path, Verify.SIZES)
        return manifest.tensors if manifest.kind == "full" else None


Source: TypeAlias = Folder | TensorStream


def weights_source(weights: Weights, probe: Probe | None = None, *, dtype: str | None = None) -> Source:
    """The source of weights, with their probe. A model's probe is computed if none is given.

    With `dtype`, floating-point numbers of models and state dicts are rounded to it, and the probe allows for that; a
    folder stays unchanged. All ranks of a sharded model must call this. Raises `WeightsError` for an object that is not
    weights, and for sharded tensors outside a sharded model.
    """
    if isinstance(weights, Path):
        return Folder(weights, probe)
    rounded = _rounded(probe, dtype)
    if _is_model(weights):
        if not _is_shared_out(weights):
            check_whole(weights.state_dict())  # before the probe's forward pass, which would wait for other ranks
        return model_stream(weights, dtype=dtype, probe=rounded or _rounded(probe_of(weights), dtype))
    if isinstance(weights, Mapping):
        check_whole(weights)
        return state_dict_stream(weights, dtype=dtype, probe=rounded)
    raise WeightsError(
        f"cannot publish a {type(weights).__name__}: publish a transformers.PreTrainedModel (the one inside, if it "
        "is wrapped), a state dict, or the Path of a folder"
    )


@contextmanager
def gathering(weights: Weights, probe: Probe | None, *, rank: int, dtype: str | None = None) -> Iterator[Source | None]:
    """Yield the source of weights on rank 0, and None on other ranks. All ranks enter.

    Other ranks first take part in gathering a sharded model.
    """
    is_shared_out = _is_shared_out(weights)
    if rank != 0 and not is_shared_out:
        yield None
        return
    source = weights_source(weights, probe, dtype=dtype)
    if not is_shared_out:
        yield source
        return
    assert isinstance(source, TensorStream)
    with source:
        if rank != 0:
            source.take_part()
        yield source if rank == 0 else None


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
    """The probe of weights rounded to `dtype`: engines may deviate as much as with that dtype. Rounding to
    float16 changes the sums, so they are dropped for it.
    """
    if probe is None or dtype is None:
        return probe
    sums = {} if dtype == "float16" else probe.sums
    return replace(probe, dtype=max(probe.dtype, dtype, key=tolerance_of), sums=sums)
