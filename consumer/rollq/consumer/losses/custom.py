"""A user-written loss: a function that returns the term of each token, named by `loss = "module.function"`.

It receives tensors for a micro-batch's n loss tokens, float32 [n] on the trainer's device: `new`, the trained policy's
logprobs, with a gradient; `old` and `behaviour`, without a gradient, see `rollq.consumer.losses.surrogates`;
`advantages`; and `samples` int64 [n], equal for tokens of one sample. It returns the terms to minimise, floating point
[n]; corrections, masks, KL and aggregation apply to them as to any surrogate.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import LOSS, check_function
from rollq.buffer.errors import ConfigError
from rollq.consumer.losses.ratios import token_ratio
from rollq.consumer.losses.surrogates import Surrogate


@cache
def load_loss(path: str) -> Callable[..., Any]:
    """The function at `path`. Raises `ConfigError` if it cannot be called as a loss."""
    function: Callable[..., Any] = load_plugin(LOSS.setting, path, {})
    check_function(function, LOSS, path)
    return function


def custom(
    path: str,
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    samples: torch.Tensor,
) -> Surrogate:
    """The terms of the function at `path`; no token counts as clipped. Raises `ConfigError` for terms that are not
    floating point [n], or that lack a gradient although `new` has one."""
    terms = load_loss(path)(new=new, old=old, behaviour=behaviour, advantages=advantages, samples=samples)
    if not isinstance(terms, torch.Tensor) or terms.shape != new.shape or not terms.is_floating_point():
        found = f"{terms.dtype} {list(terms.shape)}" if isinstance(terms, torch.Tensor) else type(terms).__name__
        raise ConfigError(f'loss = "{path}": it returned {found}; expected one term for each token, {list(new.shape)}')
    if new.requires_grad and not terms.requires_grad:
        raise ConfigError(f'loss = "{path}": it returned terms without a gradient; compute them from new')
    return Surrogate(terms, token_ratio(new.detach(), old), torch.zeros_like(new, dtype=torch.bool))
