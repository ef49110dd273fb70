"""Losses as pure functions of 1-D tensors over loss tokens, for any trainer, and the settings that compose them.

`policy_terms` composes a loss from `LossSettings`; its parts can be called alone. All logprobs are in nats, of
logits / temperature.
"""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = [
    "PRESETS",
    "LossSettings",
    "PolicyTerms",
    "Surrogate",
    "cispo",
    "clipped",
    "distillation",
    "distillation_top_k",
    "divergence_mask",
    "dppo_kl",
    "dppo_tv",
    "generalised_advantages",
    "geometric",
    "geometric_mask",
    "imitation",
    "ipo",
    "k1",
    "k2",
    "k3",
    "k3_by_k2",
    "k3_unbiased",
    "kl_in_reward",
    "masked",
    "off_policy_mask",
    "one_sided",
    "policy_terms",
    "sapo",
    "second_moment_mask",
    "sequence_importance",
    "sequence_ratio",
    "token_importance",
    "token_ratio",
    "token_weights",
    "topr",
    "truncated",
    "unclipped",
    "value_loss",
]

if TYPE_CHECKING:
    from rollq.consumer.losses.aggregation import token_weights
    from rollq.consumer.losses.components import distillation, distillation_top_k, imitation
    from rollq.consumer.losses.compose import PolicyTerms, policy_terms
    from rollq.consumer.losses.corrections import masked, sequence_importance, token_importance, truncated
    from rollq.consumer.losses.kl import k1, k2, k3, k3_by_k2, k3_unbiased, kl_in_reward
    from rollq.consumer.losses.masks import divergence_mask, geometric_mask, off_policy_mask, second_moment_mask
    from rollq.consumer.losses.presets import PRESETS
    from rollq.consumer.losses.ratios import sequence_ratio, token_ratio
    from rollq.consumer.losses.settings import LossSettings
    from rollq.consumer.losses.surrogates import Surrogate, cispo, clipped, geometric, one_sided, sapo, topr, unclipped
    from rollq.consumer.losses.trust_regions import dppo_kl, dppo_tv, ipo
    from rollq.consumer.losses.values import generalised_advantages, value_loss
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.consumer.losses.aggregation": "token_weights",
            "rollq.consumer.losses.components": "distillation distillation_top_k imitation",
            "rollq.consumer.losses.compose": "PolicyTerms policy_terms",
            "rollq.consumer.losses.corrections": "masked sequence_importance token_importance truncated",
            "rollq.consumer.losses.kl": "k1 k2 k3 k3_by_k2 k3_unbiased kl_in_reward",
            "rollq.consumer.losses.masks": "divergence_mask geometric_mask off_policy_mask second_moment_mask",
            "rollq.consumer.losses.presets": "PRESETS",
            "rollq.consumer.losses.ratios": "sequence_ratio token_ratio",
            "rollq.consumer.losses.settings": "LossSettings",
            "rollq.consumer.losses.surrogates": "Surrogate cispo clipped geometric one_sided sapo topr unclipped",
            "rollq.consumer.losses.trust_regions": "dppo_kl dppo_tv ipo",
            "rollq.consumer.losses.values": "generalised_advantages value_loss",
        },
    )
