"""`Progress`: a callback between the steps of TRL's trainer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from rollq.buffer.errors import InvalidGroup
from rollq.integrations.trl.feed import Feed


class Progress(TrainerCallback):
    """Ends each step, ends training after the last batch, and stops before an update whose gradient is not finite."""

    def __init__(self, feed: Feed, *, end_step: Callable[[], None], can_save: Callable[[], bool]) -> None:
        self._feed = feed
        self._end_step = end_step
        self._can_save = can_save

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Raise `InvalidGroup` before the update if the gradient is not finite. The batch stays claimed."""
        gradients = [parameter.grad for parameter in given["model"].parameters() if parameter.grad is not None]
        if not math.isfinite(float(torch.nn.utils.get_total_norm(gradients))):
            raise InvalidGroup(
                f"step {state.global_step + 1}: the gradient is not finite: check the weights and the learning rate; "
                "the batch stays claimed"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publish if a publication is due, and commit."""
        self._end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """When the consumer has no further batch, end training with a checkpoint."""
        if self._feed.has_ended:
            control.should_training_stop = True
            control.should_save = self._can_save()
