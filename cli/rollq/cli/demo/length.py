"""Decides how many steps a demo trains, how long they take here, and whether the model has learned. Pure."""

from collections.abc import Mapping

EVALUATIONS_PER_STEP = 6.0
"""The ratio of the roles' time for a train step to one process's time for evaluating the same number of samples.
Measured on two cores."""
LEAST_GAIN = 0.03
"""Least gain in mean reward for held-out prompts. Resampling the same prompts changes the mean by 0.012 (one standard
deviation; 16 seeds, the tiny model before training)."""


def step_seconds(evaluation_s: float, evaluated: int, samples: int) -> float:
    """The time that a step of `samples` takes here, estimated from an evaluation of `evaluated` samples."""
    return EVALUATIONS_PER_STEP * evaluation_s * samples / evaluated


def steps_within(seconds: float, step_s: float, *, least: int, most: int) -> int:
    """The number of steps that fit into the time, within `least`, enough to show learning, and `most`."""
    return max(least, min(most, int(seconds / step_s)))


def duration(seconds: float) -> str:
    """An approximate time, in words."""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"


def gain(held_out: Mapping[str, Mapping[str, float]]) -> float:
    """How much the mean reward for held-out prompts grew from `before` to `after`."""
    before, after = (sum(held_out[when].values()) / len(held_out[when]) for when in ("before", "after"))
    return after - before
