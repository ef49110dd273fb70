"""The learning rate of a train step: a function of the step alone, so a resumed trainer has the same rate."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, largest: float, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    """The learning rate of `step`, which counts from 1 to `steps`.

    It rises linearly to `largest` in the first `warmup_steps`. Then it is constant or falls to 0 in the step after the
    last: linearly, or as half a period of a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983).
    """
    if step <= warmup_steps:
        return largest * step / warmup_steps
    done = min(1.0, (step - warmup_steps - 1) / (steps - warmup_steps))
    match schedule:
        case "constant":
            return largest
        case "linear":
            return largest * (1 - done)
        case "cosine":
            return largest * (1 + math.cos(math.pi * done)) / 2
