"""Metrics of a step's loss, summed over its micro-batches: how far off policy it was, and how many tokens were
clipped."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.values.rollouts import NO_VERSION
from rollq.consumer.objective.mismatch import MismatchGauge

_INSERTED = -1
"""Replaces the staleness of tokens that the run's weights did not make."""


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over loss tokens. w = exp(new - behaviour): the trainer's weights before the update against the engine's."""

    tokens: float = 0.0
    w: float = 0.0
    w_squared: float = 0.0
    mismatch_kl: float = 0.0  # k3 estimator of KL(behaviour || new): w - log w - 1 (Schulman 2020)
    ratio: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    masked: float = 0.0
    importance: float = 0.0
    importance_squared: float = 0.0

    def __add__(self, other: "TokenSums") -> "TokenSums":
        return TokenSums(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / (n sum w^2), in (0, 1] (Kong 1992); NaN when the weights are too large or small for a float64."""
        return _effective_sample_size(self.tokens, self.w, self.w_squared)

    @property
    def importance_sample_size(self) -> float:
        """The effective sample size of the importance weights in the loss."""
        return _effective_sample_size(self.tokens, self.importance, self.importance_squared)


def _doubles(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if values is None else values.double()


def _only_if(is_known: object, **numbers: Any) -> dict[str, Any]:
    """The given numbers if they are known, otherwise none."""
    return numbers if is_known else {}


def _effective_sample_size(tokens: float, total: float, total_squared: float) -> float:
    if not 0 < total_squared < math.inf:
        return math.nan
    return total / tokens * (total / total_squared)


class LossMetrics:
    """Sums over the loss tokens of a step; `result` turns them into means."""

    def __init__(self) -> None:
        self.mismatch = MismatchGauge()
        self._tokens: list[tuple[npt.NDArray[Any], ...]] = []
        self.loss = 0.0  # so far
        self._on_policy_error = 0.0
        self._has_entropy = self._has_kl = False
        self._has_importance = False
        self._by_staleness: dict[int, TokenSums] = defaultdict(TokenSums)
        self.left_out = Counter[str]()  # loss tokens by task, of samples without logprobs

    def leave_out(self, tokens: Mapping[str, int]) -> None:
        """Count, by task, loss tokens that were left out for lack of logprobs."""
        self.left_out.update(tokens)

    def add(
        self,
        *,
        loss: torch.Tensor,
        ratio: torch.Tensor,
        was_clipped: torch.Tensor,
        mismatch: torch.Tensor,
        staleness: torch.Tensor,
        entropy: torch.Tensor | None,
        sequences: torch.Tensor,
        versions: torch.Tensor,
        was_masked: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
        kl: torch.Tensor | None = None,
    ) -> None:
        """Add a micro-batch: `loss` is a scalar; the other tensors are [n], one value per loss token. `mismatch` = new
        - behaviour; `sequences` holds indices into `Batch.sequences`; `importance` holds a correction's weights, if the
        loss has one; `kl` estimates the divergence from the reference, if there is one. Inserted tokens have no engine,
        so no metric in `result` includes their mismatch."""
        self.loss += float(loss)
        self._has_entropy = entropy is not None
        self._has_kl = kl is not None
        self._has_importance = importance is not None
        inserted = versions == NO_VERSION
        self.mismatch.add(mismatch[~inserted], sequences[~inserted], versions[~inserted])
        self._tokens.append(tuple([value.cpu().numpy() for value in (mismatch, ratio, was_clipped, sequences)]))
        w = mismatch.double().exp()
        per_token = {
            "tokens": torch.ones_like(w),
            "w": w,
            "w_squared": w**2,
            "mismatch_kl": w - mismatch - 1,
            "ratio": ratio.double(),
            "clipped": was_clipped.double(),
            "entropy": _doubles(entropy, w),
            "kl": _doubles(kl, w),
            "masked": _doubles(was_masked, w),
            "importance": _doubles(importance, w),
            "importance_squared": _doubles(importance, w) ** 2,
        }
        # one transfer from the device
        values, ages = torch.stack(list(per_token.values())).cpu(), staleness.masked_fill(inserted, _INSERTED).cpu()
        for age in sorted(set(ages.tolist())):
            sums = values[:, ages == age].sum(1).tolist()
            self._by_staleness[age] += TokenSums(**dict(zip(per_token, sums, strict=True)))
        on_policy = mismatch[(staleness == 0) & ~inserted]
        if len(on_policy):
            self._on_policy_error = max(self._on_policy_error, float(on_policy.abs().max()))

    def rescale(self, factor: float) -> None:
        """Multiply the loss so far by a factor."""
        self.loss *= factor

    def sums(self) -> dict[str, Any]:
        """The sums as JSON, for another rank's `add_sums`."""
        return {
            "loss": self.loss,
            "on_policy_error": self._on_policy_error,
            "has_entropy": self._has_entropy,
            "has_kl": self._has_kl,
            "has_importance": self._has_importance,
            "by_staleness": [[age, *astuple(sums)] for age, sums in self._by_staleness.items()],
            "left_out": self.left_out,
        }

    def add_sums(self, sums: Mapping[str, Any]) -> None:
        """Add another rank's sums. Values that are not finite arrive as None."""
        self.loss += sums["loss"]
        error = sums["on_policy_error"]
        self._on_policy_error = max(self._on_policy_error, math.inf if error is None else error)
        self._has_entropy |= sums["has_entropy"]
        self._has_kl |= sums["has_kl"]
        self._has_importance |= sums["has_importance"]
        self.left_out.update(sums["left_out"])
        for age, *values in sums["by_staleness"]:
            self._by_staleness[age] += TokenSums(*(math.nan if value is None else value for value in values))

    def of_tokens(self) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any]]:
        """Each loss token's `mismatch`, `ratio` and `clipped`, [n] each, and its sequence's index into
        `Batch.sequences`."""
        if not self._tokens:
            return {}, np.zeros(0, np.int64)
        mismatch, ratio, clipped, sequences = (np.concatenate(parts) for parts in zip(*self._tokens, strict=True))
        return {"mismatch": mismatch, "ratio": ratio, "clipped": clipped}, sequences

    @property
    def on_policy_error(self) -> float:
        """The largest |new - behaviour| of a token with staleness 0, in nats. Without faults it is only rounding."""
        return self._on_policy_error

    def result(self) -> dict[str, Any]:
        """Plain numbers: means over the loss tokens, and the tokens and effective sample size of each staleness.

        `entropy` is present only if measured, `kl` only with a reference, `importance` only with a correction, and
        `staleness`, a mean, only if some tokens were not inserted. `masked_fraction` is the fraction of tokens that a
        correction or a mask left out. `inserted_tokens`, present if any were inserted, count in `tokens`, but not in
        `mismatch_kl` or by staleness. `without_logprobs` counts, by task, tokens that were left out for lack of
        logprobs; no other number includes them.
        """
        by_staleness = sorted((age, sums) for age, sums in self._by_staleness.items() if age != _INSERTED)
        sampled = sum((sums for _, sums in by_staleness), TokenSums())
        inserted = self._by_staleness.get(_INSERTED, TokenSums())
        total = sampled + inserted
        tokens, counted = max(total.tokens, 1.0), max(sampled.tokens, 1.0)
        return {
            "loss": self.loss,
            "tokens": int(total.tokens),
            **_only_if(inserted.tokens, inserted_tokens=int(inserted.tokens)),
            **_only_if(self.left_out, without_logprobs=dict(self.left_out)),
            "mismatch_kl": sampled.mismatch_kl / counted,
            "ratio": total.ratio / tokens,
            "clip_fraction": total.clipped / tokens,
            "masked_fraction": total.masked / tokens,
            **_only_if(
                self._has_importance and total.tokens,
                importance=total.importance / tokens,
                importance_effective_sample_size=total.importance_sample_size,
            ),
            **_only_if(self._has_entropy, entropy=total.entropy / tokens),
            **_only_if(self._has_kl, kl=total.kl / tokens),
            "on_policy_error": self._on_policy_error,
            **_only_if(sampled.tokens, staleness=sum(age * sums.tokens for age, sums in by_staleness) / counted),
            "staleness_tokens": {str(age): int(sums.tokens) for age, sums in by_staleness},
            "effective_sample_size": {str(age): sums.effective_sample_size for age, sums in by_staleness},
        }
