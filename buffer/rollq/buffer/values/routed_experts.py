"""The named array `routed_experts`: the experts that processed each token in a mixture of experts. With it, the trainer
can replay the routing.

Its shape is [T, layers, top_k]. Entry t belongs to the forward pass that read token t, whose logits gave token t + 1;
the last token that an engine makes has not been read. Experts are numbered from 1, and 0 means that the decision is
unknown, so an array that is padded with zeros stays correct. All layers count, including layers without experts. The
dtype is uint8 up to 255 experts, and uint16 beyond.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

ROUTED_EXPERTS = "routed_experts"
"""Name of the array in `Completion.arrays`, `Segment.arrays` and `MicroBatch.arrays`."""
ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\..*\b(?:gate|router)$")
"""A router's name in a transformers model, with its layer number."""


def number_experts(chosen: npt.NDArray[Any], experts: int) -> npt.NDArray[Any]:
    """The array `routed_experts` from indices `chosen` [T, layers, top_k], from 0, into a model's `experts` experts."""
    return chosen.astype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16) + 1


def find_routers(model: Any) -> dict[int, Any]:
    """The modules of a transformers model that choose experts, by layer number, from 0.

    Only classes named `...TopKRouter` count: they return logits, weights and indices. Empty for models without such
    classes.
    """
    routers = {}
    for name, module in model.named_modules():
        layer = ROUTER.search(name)
        if layer is not None and type(module).__name__.endswith("TopKRouter") and hasattr(module, "top_k"):
            routers[int(layer[1])] = module
    return routers
