"""What a step's loss tells about off-policyness, summed over its micro-batches. Needs torch."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rollq.buffer.replies import Production


def describe_production(production: Production) -> dict[str, Any]:
    """What a task produced since the last step, as plain numbers.

    `groups`: by where they were filed; `tokens_per_s`: new tokens; `reward`: mean of judged samples, before any filter;
    `group_generate_time_s`: count, mean, p50 and p99 of how long groups took, over the last 1000 of them, where
    p50 = sorted[n // 2] and p99 = sorted[int(0.99 n)].
    """
    sums = dict(production.sums)
    tokens, reward, judged = (sums.pop(name, 0) for name in ("tokens", "reward_sum", "reward_count"))
    return {
        "groups": {name: int(number) for name, number in sums.items()},
        "tokens_per_s": tokens / production.seconds if production.seconds else 0.0,
        "reward": reward / judged if judged else None,
        "group_generate_time_s": times(production.timings_ms),
    }


def times(timings_ms: Sequence[int]) -> dict[str, float]:
    """Count, mean, p50 and p99 of durations in ms, in s; the count alone without any."""
    ordered = sorted(timings_ms)
    n = len(ordered)
    if not n:
        return {"count": 0}
    return {
        "count": n,
        "mean": sum(ordered) / n / 1000,
        "p50": ordered[n // 2] / 1000,
        "p99": ordered[int(0.99 * n)] / 1000,
    }


class LossMetrics:
    """Sums over the loss tokens of a step; `result` turns them into means.

    Importance weights here are w = exp(new - behaviour), the trainer's weights before the update against the engine.
    """

    def __init__(self) -> None:
        self._loss = 0.0
        self._on_policy_error = 0.0
        # staleness -> [tokens, sum w, sum w^2, sum of k3, sum of ratios, clipped tokens, sum of entropies]
        self._sums: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(7, dtype=torch.float64))

    def add(
        self,
        *,
        loss: torch.Tensor,
        ratio: torch.Tensor,
        was_clipped: torch.Tensor,
        mismatch: torch.Tensor,
        staleness: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> None:
        """Add a micro-batch: `loss` scalar; the others [n] per loss token, `mismatch` = new - behaviour logprobs."""
        self._loss += float(loss)
        weight = mismatch.double().exp()
        columns = torch.stack(
            [
                torch.ones_like(weight),
                weight,
                weight**2,
                weight - mismatch - 1,
                ratio.double(),
                was_clipped.double(),
                torch.zeros_like(weight) if entropy is None else entropy.double(),
            ]
        ).cpu()
        ages = staleness.cpu()
        for age in sorted(set(ages.tolist())):
            self._sums[age] += columns[:, ages == age].sum(1)
        fresh = mismatch[staleness == 0]
        if len(fresh):
            self._on_policy_error = max(self._on_policy_error, float(fresh.abs().max()))

    @property
    def loss(self) -> float:
        """The loss so far."""
        return self._loss

    @property
    def on_policy_error(self) -> float:
        """Largest |new - behaviour| logprob of a token of staleness 0, which should be rounding alone."""
        return self._on_policy_error

    def result(self) -> dict[str, Any]:
        """Plain numbers: means over loss tokens, and by staleness the tokens and their effective sample size.

        mismatch_kl: KL(behaviour || new), k3 estimator w - log w - 1 (Schulman 2020). effective_sample_size:
        (sum w)^2 / (n sum w^2) in (0, 1] (Kong 1992).
        """
        total = sum(self._sums.values(), torch.zeros(7, dtype=torch.float64))
        tokens = max(float(total[0]), 1.0)
        return {
            "loss": self._loss,
            "tokens": int(total[0]),
            "mismatch_kl": float(total[3]) / tokens,
            "ratio": float(total[4]) / tokens,
            "clip_fraction": float(total[5]) / tokens,
            "entropy": float(total[6]) / tokens,
            "on_policy_error": self._on_policy_error,
            "staleness_tokens": {str(age): int(sums[0]) for age, sums in sorted(self._sums.items())},
            "effective_sample_size": {
                str(age): float(sums[1] ** 2 / (sums[0] * sums[2])) for age, sums in sorted(self._sums.items())
            },
        }
