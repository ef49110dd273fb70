"""Model passes in a dtype that differs from the parameters', for updates at a small learning rate.

AdamW moves each number by about the learning rate. Numbers around 0.02 are 1e-4 apart in bfloat16, so updates of 1e-6
are rounded away. Trained parameters are therefore float32, and passes run on rounded copies. Needs torch.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollq.consumer.weights.checkpoint_format import kept_precise


@contextmanager
def computing_in(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Run a transformers model with its parameters rounded to `dtype`, in forward and backward passes.

    Gradients accumulate in the parameters, in the parameters' dtype. Parameters that transformers keeps in float32 are
    not rounded. If `dtype` is None, no parameter is rounded.
    """
    if dtype is None:
        yield
        return
    held = list(_to_round(model, kept_precise(model, str(dtype).removeprefix("torch."))))
    # tied parameters share one copy
    rounded = {parameter: parameter.to(dtype) for parameter in {parameter for *_, parameter in held}}
    try:
        for parameters, key, parameter in held:
            parameters[key] = rounded[parameter]
        yield
    finally:
        for parameters, key, parameter in held:
            parameters[key] = parameter


def _to_round(model: Any, precise: Collection[str]) -> Iterator[tuple[dict[str, Any], str, torch.nn.Parameter]]:
    """The parameters to round, each with its module's dictionary and its key there."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() and not any(part in name for part in precise):
            path, _, key = name.rpartition(".")
            yield model.get_submodule(path)._parameters, key, parameter
