"""Whether an engine gives the logprobs that its weights should give."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import Float32Array
from rollq.buffer.weights.probe import Probe, difference, tolerance_of


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """How far the engine's logprobs were from those it should give, in the mean, and how far they may be; in nats."""

    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the logprobs are near enough. Those that are not finite never are."""
        return self.difference <= self.tolerance


class WeightsRejected(WeightsError):
    """The engine has loaded weights, and gives other logprobs with them than it should: it serves nothing now."""


class WeightsLate(WeightsRejected):
    """Servers that something else loads weights into do not serve the published ones yet, and may do so later."""


def compare(expected: Probe, found: Sequence[Float32Array], dtype: str) -> WeightsCheck:
    """The check of logprobs float32 [T - 1] of the probe's prompts, from a forward pass in `dtype`."""
    return WeightsCheck(difference(expected.logprobs, found), tolerance_of(dtype, expected.dtype))
