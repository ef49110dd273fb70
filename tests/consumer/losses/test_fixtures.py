"""Every loss of the kit against the implementation of another project: value and gradient to 1e-6."""

from typing import Any

import pytest
import torch

from rollq.consumer.losses import (
    LossSettings,
    PolicyTerms,
    distillation,
    divergence_mask,
    generalised_advantages,
    geometric_mask,
    imitation,
    k1,
    k2,
    k3,
    k3_by_k2,
    masked,
    off_policy_mask,
    policy_terms,
    second_moment_mask,
    sequence_importance,
    token_importance,
    token_ratio,
    token_weights,
    truncated,
    unclipped,
)
from rollq.consumer.losses.trust_regions import moved_probability
from support.loss_fixtures import Inputs, cases, inputs

RECOMPUTED = {"old_logprobs": "recomputed"}
TIS = {**RECOMPUTED, "correction": "truncated", "importance_cap": 1.2}
MIS = {**RECOMPUTED, "correction": "masked"}
ON_OLD = {**RECOMPUTED, "correction": "none"}

TRL: dict[str, dict[str, Any]] = {
    "grpo_sequence_mean": {"preset": "grpo", **ON_OLD},
    "dapo_token_mean_clip_higher": {"preset": "dapo", **ON_OLD},
    "dr_grpo_constant": {"preset": "dr_grpo", "constant_tokens": 10, **ON_OLD},
    "gspo": {"preset": "gspo", **ON_OLD},
    "gspo_wide": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.2, **ON_OLD},
    # TRL's epsilon_high is the cap itself
    "cispo": {"preset": "cispo", "ratio_cap": 1.3, **ON_OLD},
    "sapo": {"preset": "sapo", **ON_OLD},
    "dual_clip_delta": {"dual_clip": 1.5, **ON_OLD},
    "kl_k3": {"kl_coefficient": 0.1, "kl": "k3", **ON_OLD},
    "kl_k3_bias_corrected": {"kl_coefficient": 0.1, "kl": "k3_unbiased", **ON_OLD},
    "opsm": {"preset": "grpo", "mask": "opsm", "mask_divergence": 0.05, **ON_OLD},
    "dapo_tis_token_2": TIS,
    "dapo_tis_sequence": {**TIS, "correction_level": "sequence"},
    "dapo_mis_token": {**MIS, "importance_floor": 0.8, "importance_cap": 1.2},
    "dapo_mis_sequence": {**MIS, "correction_level": "sequence", "importance_floor": 0.5, "importance_cap": 1.5},
}
VERL: dict[str, dict[str, Any]] = {
    "ppo_dual_clip": {"dual_clip": 3.0, **ON_OLD},
    "dppo_tv": {"preset": "dppo_tv", "trust_low": 0.05, "trust_high": 0.05},
    "dppo_kl": {"preset": "dppo_kl", "trust_low": 0.01, "trust_high": 0.01},
    "gspo": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.2, **ON_OLD},
    # verl's clip_ratio_high is the cap less 1
    "cispo": {"preset": "cispo", "ratio_cap": 1 + 0.3, **ON_OLD},
    "sapo": {"preset": "sapo", **ON_OLD},
    "gmpo": {"preset": "gmpo", **ON_OLD},
}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def terms_of(settings: LossSettings, values: Inputs) -> PolicyTerms:
    return policy_terms(
        settings,
        new=values.new,
        old=values.old,
        behaviour=values.behaviour,
        advantages=values.advantages,
        samples=values.samples,
        reference=values.reference,
    )


def mean_of(terms: torch.Tensor, settings: LossSettings, values: Inputs) -> torch.Tensor:
    weights = token_weights(
        values.sample_tokens, settings.aggregation, tokens=18, samples=4, constant=settings.constant_tokens
    )
    return (terms * weights).sum()


def check(loss: torch.Tensor, values: Inputs, case: Any) -> None:
    assert_close(loss.detach(), torch.tensor(case["loss"], dtype=torch.float64))
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.new.grad is not None
    expected = values.flat(case["grad"])
    assert expected.abs().max() > 1e-3
    assert_close(values.new.grad, expected)


@pytest.mark.parametrize(
    ("file", "name"), [("trl_grpo.json", name) for name in TRL] + [("verl_losses.json", name) for name in VERL]
)
def test_a_composed_loss_has_the_value_and_the_gradient_of_another_implementation(file: str, name: str) -> None:
    settings = LossSettings.model_validate((TRL if file == "trl_grpo.json" else VERL)[name])
    values = inputs(file)
    check(mean_of(terms_of(settings, values).terms, settings, values), values, cases(file)[name])


def test_every_case_of_trl_is_checked() -> None:
    assert set(cases("trl_grpo.json")) == set(TRL)


@pytest.mark.parametrize(("name", "estimator"), [("kl_k1", k1), ("kl_k2", k2), ("kl_k3", k3), ("kl_k3+", k3_by_k2)])
def test_kl_estimators_are_those_of_verl(name: str, estimator: Any) -> None:
    values, case = inputs(), cases("verl_losses.json")[name]
    found = estimator(values.new, values.reference)
    assert_close(found.detach(), values.flat(case["per_token"]))
    check(found.mean(), values, case)


def test_ipo_is_that_of_prime_rl() -> None:
    values = inputs()
    settings = LossSettings(preset="ipo", trust_low=0.05, trust_high=0.05, pull=1e-3)
    check(mean_of(terms_of(settings, values).terms, settings, values), values, cases("prime_rl_losses.json")["ipo"])


def test_the_default_loss_of_prime_rl_is_made_of_parts() -> None:
    """-A u where the probability moved little in the direction of A, plus k log(u)^2 for all tokens."""
    values = inputs()
    kept = ~moved_probability(values.new, values.behaviour, values.advantages, low=0.05, high=0.05)
    gain = unclipped(token_ratio(values.new, values.behaviour), values.advantages).terms
    loss = torch.where(kept, gain, 0.0) + 1e-3 * (values.new - values.behaviour) ** 2
    check(loss.mean(), values, cases("prime_rl_losses.json")["dppo_kl2"])


def test_distillation_and_imitation_are_those_of_prime_rl() -> None:
    values = inputs()
    loss = distillation(values.new, values.behaviour, values.reference).mean()
    check(loss, values, cases("prime_rl_losses.json")["opd_ref_kl"])
    values = inputs()
    check(imitation(values.new).mean(), values, cases("prime_rl_losses.json")["ce"])


def test_cispo_is_that_of_slime_token_by_token() -> None:
    values = inputs()
    settings = LossSettings.model_validate({"preset": "cispo", "ratio_cap": 1.3, **ON_OLD})
    expected = values.flat(cases("slime.json")["cispo"]["per_token"])
    assert_close(terms_of(settings, values).terms.detach(), expected)


def test_the_off_policy_mask_is_that_of_slime() -> None:
    values = inputs()
    found = off_policy_mask(values.new, values.behaviour, values.advantages, values.samples, most=0.05)
    assert found.tolist() == (values.flat(cases("slime.json")["opsm_0.05"]["mask"]) > 0).tolist()
    assert not found.all()


@pytest.mark.parametrize("name", ["m2po_0.01", "m2po_0.02", "m2po_0.04"])
def test_the_second_moment_mask_is_that_of_areal(name: str) -> None:
    values, case = inputs(), cases("areal_m2po.json")[name]
    found = second_moment_mask(values.old, values.behaviour, most=case["threshold"])
    assert found.tolist() == (values.flat(case["mask"]) > 0).tolist()


def test_importance_weights_are_those_of_verl() -> None:
    values, found = inputs(), cases("verl_rollout_correction.json")
    token = token_importance(values.old, values.behaviour)
    sequence = sequence_importance(values.old, values.behaviour, values.samples)
    for name, weights in {
        "is_token_2.0": truncated(token, cap=2.0),
        "is_token_1.2": truncated(token, cap=1.2),
        "is_sequence_1.2": truncated(sequence, cap=1.2),
        "is_token_0.8_1.2": masked(token, low=0.8, high=1.2),
        "is_token_1.2_batch_normalised": truncated(token, cap=1.2) / truncated(token, cap=1.2).mean(),
    }.items():
        assert_close(weights, values.flat(found[name]["weights"]))


@pytest.mark.parametrize("name", [name for name in cases("verl_rollout_correction.json") if name.startswith("rs_")])
def test_rejection_masks_are_those_of_verl_whose_k1_bounds_hold_for_the_inverse(name: str) -> None:
    values = inputs()
    samples = (values.old, values.behaviour, values.samples)
    token = token_importance(values.old, values.behaviour)
    found = {
        "rs_token_k1_0.8_1.2": lambda: masked(token, low=1 / 1.2, high=1 / 0.8) > 0,
        "rs_token_k1_0.9_1.3": lambda: masked(token, low=1 / 1.3, high=1 / 0.9) > 0,
        "rs_token_k3_0.02": lambda: divergence_mask(*samples, estimator="k3", over="token", most=0.02),
        "rs_seq_sum_k1_0.5_1.5": lambda: masked(sequence_importance(*samples), low=1 / 1.5, high=1 / 0.5) > 0,
        "rs_seq_mean_k1_0.95_1.05": lambda: geometric_mask(*samples, low=1 / 1.05, high=1 / 0.95),
        "rs_seq_mean_k3_0.02": lambda: divergence_mask(*samples, estimator="k3", over="mean", most=0.02),
        "rs_seq_max_k2_0.05": lambda: divergence_mask(*samples, estimator="k2", over="max", most=0.05),
    }[name]()
    assert found.tolist() == (values.flat(cases("verl_rollout_correction.json")[name]["mask"]) > 0).tolist()


def test_the_bounds_of_masked_weights_hold_for_the_weight_and_not_for_its_inverse() -> None:
    values = inputs()
    token = token_importance(values.old, values.behaviour)
    inverse = values.flat(cases("verl_rollout_correction.json")["rs_token_k1_0.9_1.3"]["mask"]) > 0
    assert (masked(token, low=0.9, high=1.3) > 0).tolist() != inverse.tolist()


def test_advantages_of_a_critic_are_those_of_verl_and_skip_masked_tokens() -> None:
    values, case = inputs(), cases("verl_losses.json")["gae"]
    advantages, returns = generalised_advantages(
        values.flat(case["rewards"]), values.flat(case["values"]), values.samples, gamma=0.99, lam=0.95
    )
    assert_close(advantages, values.flat(case["advantages_unwhitened"]))
    assert_close(returns, values.flat(case["returns"]))
