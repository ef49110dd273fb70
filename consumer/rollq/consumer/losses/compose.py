"""Composes a loss from its settings: surrogate, importance weights, mask and KL. Pure functions of tensors."""

from typing import Final, NamedTuple

import torch

from rollq.buffer.errors import ConfigError
from rollq.consumer.losses import kl
from rollq.consumer.losses.corrections import masked, sequence_importance, token_importance, truncated
from rollq.consumer.losses.custom import custom
from rollq.consumer.losses.masks import geometric_mask, off_policy_mask
from rollq.consumer.losses.ratios import sequence_ratio, token_ratio
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.losses.surrogates import Surrogate, cispo, clipped, geometric, one_sided, sapo, topr, unclipped
from rollq.consumer.losses.trust_regions import dppo_kl, dppo_tv, ipo


class PolicyTerms(NamedTuple):
    """The terms of n loss tokens under a loss, and values that explain them, each [n].

    The loss to minimise is the sum of weight * term over `terms`, with the weights from `token_weights`. The other
    fields have no gradients: `ratio` is the ratio that the surrogate used; `was_clipped` and `was_masked` (left out by
    a mask or a weight of 0) are bool; `importance` is the token's weight, 1 without a correction.
    """

    terms: torch.Tensor
    ratio: torch.Tensor
    was_clipped: torch.Tensor
    was_masked: torch.Tensor
    importance: torch.Tensor


def policy_terms(
    settings: LossSettings,
    *,
    new: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    samples: torch.Tensor,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> PolicyTerms:
    """Compute the terms of n loss tokens, without aggregation.

    All tensors are [n]. Logprobs are in nats: `new` of the policy that is trained, `behaviour` of the engine, `old` of
    the weights before the first update on the batch (default: the current weights), and `reference` of the reference
    model. `old` is used with `settings.old_logprobs = "recomputed"`, and by the mask `geometric`. `samples`, int64, is
    equal for tokens of one sample; with `settings.needs_whole_samples`, all tokens of a sample must be present. `keep`,
    bool, marks the tokens that the caller's mask keeps (default: all).

    Raises `ConfigError` if `settings.kl_coefficient` > 0 and there are no reference logprobs.
    """
    before = new.detach() if old is None else old
    old = before if settings.takes_old_logprobs and settings.old_logprobs == "recomputed" else behaviour
    if settings.kl_coefficient > 0 and settings.kl == "reward":
        coefficient = settings.kl_coefficient
        advantages = kl.kl_in_reward(advantages, new, _needed(reference), coefficient=coefficient)
    surrogate = _surrogate(settings, new, old, behaviour, advantages, samples)
    terms, counted, importance = surrogate.terms, keep, torch.ones_like(behaviour)
    if settings.is_corrected:
        importance = _importance(settings, old, behaviour, samples)
        if settings.correction == "masked":
            counted = _both(counted, importance > 0)
        terms = importance * terms
    if settings.mask != "none":
        counted = _both(counted, _mask(settings, new, before, behaviour, advantages, samples))
    if counted is not None:
        terms = torch.where(counted, terms, 0.0)
    if settings.kl_coefficient > 0 and settings.kl != "reward":
        terms = terms + settings.kl_coefficient * _divergence(settings, new, old, _needed(reference))
    was_masked = torch.zeros_like(surrogate.was_clipped) if counted is None else ~counted
    return PolicyTerms(terms, surrogate.ratio, surrogate.was_clipped, was_masked, importance)


def _mask(
    settings: LossSettings,
    new: torch.Tensor,
    before: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    samples: torch.Tensor,
) -> torch.Tensor:
    """The tokens [n] that the loss's mask keeps."""
    if settings.mask == "geometric":
        return geometric_mask(before, behaviour, samples, low=settings.mask_low, high=settings.mask_high)
    return off_policy_mask(new, behaviour, advantages, samples, most=settings.mask_divergence)


_DPPO: Final = {"dppo_tv": dppo_tv, "dppo_kl": dppo_kl}


def _surrogate(
    settings: LossSettings,
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    samples: torch.Tensor,
) -> Surrogate:
    trust = {"low": settings.trust_low, "high": settings.trust_high}
    match settings.surrogate:
        case "dppo_tv" | "dppo_kl" as kind:
            return _DPPO[kind](new, behaviour, advantages, **trust, cap=settings.ratio_cap)
        case "ipo":
            return ipo(new, behaviour, advantages, **trust, pull=settings.pull)
        case "topr":
            return topr(new, behaviour, advantages, samples)
        case "custom":
            return custom(settings.preset, new, old, behaviour, advantages, samples)
        case "gmpo":
            return geometric(new, old, advantages, samples, low=settings.clip_low, high=settings.clip_high)
    ratio = token_ratio(new, old) if settings.ratio == "token" else sequence_ratio(new, old, samples)
    return _of_ratio(settings, new, ratio, advantages)


def _of_ratio(settings: LossSettings, new: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    bounds = {"low": settings.clip_low, "high": settings.clip_high}
    match settings.surrogate:
        case "clipped":
            return clipped(ratio, advantages, **bounds, dual=settings.dual_clip)
        case "rec":
            return one_sided(new, ratio, advantages, **bounds)
        case "cispo":
            return cispo(new, ratio, advantages, cap=settings.ratio_cap)
        case "sapo":
            return sapo(ratio, advantages, positive=settings.sapo_positive, negative=settings.sapo_negative)
        case _:
            return unclipped(ratio, advantages)


def _importance(
    settings: LossSettings, old: torch.Tensor, behaviour: torch.Tensor, samples: torch.Tensor
) -> torch.Tensor:
    is_token = settings.correction_level == "token"
    weights = token_importance(old, behaviour) if is_token else sequence_importance(old, behaviour, samples)
    if settings.correction == "truncated":
        return truncated(weights, cap=settings.importance_cap)
    if settings.correction == "masked":
        return masked(weights, low=settings.importance_floor, high=settings.importance_cap)
    return weights


def _divergence(settings: LossSettings, new: torch.Tensor, old: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    match settings.kl:
        case "k2":
            return kl.k2(new, reference)
        case "k3_unbiased":
            return kl.k3_unbiased(new, reference, token_ratio(new, old))
        case "k3_by_k2":
            return kl.k3_by_k2(new, reference)
        case _:
            return kl.k3(new, reference)


def _needed(reference: torch.Tensor | None) -> torch.Tensor:
    if reference is None:
        raise ConfigError(
            "kl_coefficient > 0 needs the reference's logprobs: token_logprobs(reference_model, micro).logprobs"
        )
    return reference


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second
