"""Checks, by logprobs, parameter sums and cache, whether an engine serves the right weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import Float32Array
from rollq.buffer.weights.probe import Probe, difference, probe_prompts, tolerance_of, wrong_tensors
from rollq.workers.engines.protocol import CachingEngine, Scorer, Summing
from rollq.workers.engines.tensors import few


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """The mean distance of the engine's logprobs from the expected logprobs, and the allowed distance, in nats."""

    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the logprobs are close enough. Logprobs that are not finite never pass."""
        return self.difference <= self.tolerance


@runtime_checkable
class SelfChecking(Protocol):
    """The additional members of an `Engine` that checks the weights of each of its servers."""

    @property
    def check(self) -> WeightsCheck | None:
        """The check of the serving server with the largest difference; None if no server was compared."""

    def expect(self, probe: Probe | None) -> None:
        """Let a server serve the next `swap`'s weights only if its logprobs equal `probe`'s or, without a probe, the
        first server's. The rule also holds for servers that rejoin later. That `swap` names the new version, and raises
        `WeightsRejected` if no server passes."""


class WeightsRejected(WeightsError):
    """The engine returns wrong logprobs with its new weights, and no longer serves."""


class WeightsLate(WeightsRejected):
    """Servers that get their weights from another program do not serve the published weights yet, and may do so
    later."""


def compare(expected: Probe, logprobs: Sequence[Float32Array], dtype: str) -> WeightsCheck:
    """Compare the probe prompts' logprobs float32 [T - 1], from a forward pass in `dtype`, with the expected
    logprobs."""
    return WeightsCheck(difference(expected.logprobs, logprobs), tolerance_of(dtype, expected.dtype))


async def check_logprobs(engine: Scorer, number: int, probe: Probe | None) -> WeightsCheck | None:
    """Compare the engine's logprobs under weights version `number` with the probe's; without a probe, only check that
    they are finite. Returns None if the engine returns no prompt logprobs.

    Raises `WeightsRejected` if the engine lacks tokens of the probe, or can score none of its prompts.
    """
    prompts = probe_prompts(engine.vocabulary) if probe is None else probe.prompts
    try:
        if (token := max(int(prompt.max()) for prompt in prompts)) >= engine.vocabulary:
            raise WeightsError(
                f"their probe holds token {token}, and the engine's tokens end at {engine.vocabulary - 1}"
            )
        logprobs = await engine.score(prompts)
    except WeightsError as error:
        raise WeightsRejected(f"weights of version {number} cannot be checked: {error}") from error
    if logprobs is None:
        return None
    if probe is None:
        return WeightsCheck(difference(logprobs, logprobs), tolerance_of(engine.dtype))
    return compare(probe, logprobs, engine.dtype)


async def _confirm_sums(engine: Summing, number: int, probe: Probe) -> None:
    wrong = wrong_tensors(probe.sums, await engine.bit_sums()) if probe.sums else ()
    if wrong:
        raise WeightsRejected(
            f"weights of version {number}: the engine's parameters differ from the trainer's: {few(wrong)}"
        )


async def confirm(engine: Scorer, number: int, probe: Probe | None, check: WeightsCheck) -> None:
    """Raise `WeightsRejected` if the check fails, the engine's parameter sums differ from the probe's, or its cache
    does not belong to version `number`."""
    if not check.passed:
        trainer = engine.dtype if probe is None else probe.dtype
        raise WeightsRejected(
            f"weights of version {number}: the engine's logprobs differ from the trainer's by {check.difference:.2g} "
            f"nats on average, more than {check.tolerance:g} (trainer {trainer}, engine {engine.dtype})"
        )
    if isinstance(engine, Summing) and probe is not None:
        await _confirm_sums(engine, number, probe)
    if isinstance(engine, CachingEngine):
        apart = await engine.cache_error()
        if apart > tolerance_of(engine.dtype):
            raise WeightsRejected(
                f"weights of version {number}: the engine's prompt cache belongs to other weights: logprobs after a "
                f"cached prompt are {apart:.2g} nats off on average"
            )
