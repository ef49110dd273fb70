"""The parts of the kit on hand-made and on hostile input."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.errors import ConfigError
from rollq.consumer.losses import (
    PRESETS,
    LossSettings,
    PolicyTerms,
    clipped,
    distillation_top_k,
    dppo_kl,
    generalised_advantages,
    geometric,
    k1,
    k2,
    k3,
    kl_in_reward,
    off_policy_mask,
    policy_terms,
    second_moment_mask,
    sequence_ratio,
    token_ratio,
    token_weights,
    topr,
    value_loss,
)

LOSSES: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    {"ratio": "sequence"},
    {"preset": "cispo", "ratio": "sequence"},
    {"preset": "reinforce", "ratio": "sequence", "old_logprobs": "recomputed", "correction_level": "sequence"},
    {"dual_clip": 3.0},
    {"mask": "opsm"},
    *({"kl": kl, "kl_coefficient": 0.1} for kl in ("k2", "k3", "k3_unbiased", "k3_by_k2", "reward")),
]


def tensor(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


def terms_of(loss: dict[str, Any], new: torch.Tensor, behaviour: torch.Tensor, **more: Any) -> PolicyTerms:
    values = {
        "advantages": torch.ones_like(behaviour),
        "samples": torch.zeros(len(behaviour), dtype=torch.int64),
        "old": new.detach() - 0.1,
        "reference": new.detach() - 0.2,
    }
    return policy_terms(LossSettings.model_validate(loss), new=new, behaviour=behaviour, **{**values, **more})


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_without_tokens_there_are_no_terms(loss: dict[str, Any]) -> None:
    new = tensor(grad=True)
    terms = terms_of(loss, new, tensor()).terms
    assert terms.shape == (0,)
    terms.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_one_token_on_policy_has_the_gradient_of_its_advantage(loss: dict[str, Any]) -> None:
    for advantage in (2.0, -2.0):
        new = tensor(-1.5, grad=True)
        found = terms_of(
            loss, new, tensor(-1.5), old=tensor(-1.5), reference=tensor(-1.5), advantages=tensor(advantage)
        )
        found.terms.sum().backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        assert new.grad.item() == pytest.approx(-advantage)
        assert (found.ratio.item(), found.importance.item()) == (1, 1)
        assert not found.was_clipped.item()
        assert not found.was_masked.item()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("nats", [-500.0, -90.0, 90.0, 500.0])
def test_tokens_absurdly_far_off_policy_have_finite_terms_and_gradients(loss: dict[str, Any], nats: float) -> None:
    for advantage in (1.0, -1.0):
        for old, reference in ((-1.0, -1.0 - nats), (-1.0 - nats, -1.0)):
            new = tensor(-1.0, -1.0, grad=True)
            found = terms_of(
                loss,
                new,
                tensor(-1.0 - nats, -1.0),
                old=tensor(old, -1.0),
                reference=tensor(reference, -1.0),
                advantages=tensor(advantage, advantage),
            )
            assert found.terms.isfinite().all()
            found.terms.sum().backward()  # type: ignore[no-untyped-call]
            assert new.grad is not None
            assert new.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_mask_of_the_caller_leaves_tokens_out_of_the_policy_term(loss: dict[str, Any]) -> None:
    """Dropped by the caller, a token has no gradient but that of the KL, and the others keep theirs."""
    loss = {name: value for name, value in loss.items() if not name.startswith("kl")}

    def gradient(keep: torch.Tensor | None) -> torch.Tensor:
        new = tensor(-1.0, -2.0, grad=True)
        behaviour, samples = tensor(-1.01, -2.0), torch.tensor([0, 1])
        terms_of(loss, new, behaviour, samples=samples, keep=keep).terms.sum().backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        return new.grad

    whole, part = gradient(None), gradient(torch.tensor([False, True]))
    assert part[0] == 0
    assert part[1] == whole[1]
    assert gradient(torch.tensor([False, False])).abs().sum() == 0


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if "kl" in loss], ids=str)
def test_kl_without_a_reference_is_an_error_that_names_the_setting(loss: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"kl_coefficient > 0 needs the reference's logprobs: token_logprobs"):
        terms_of(loss, tensor(-1.0, grad=True), tensor(-1.0), reference=None)


def test_rejected_tokens_are_reported_and_do_not_change_the_terms_of_others() -> None:
    behaviour = tensor(-1.0, -1.0 - math.log(9), -1.0)
    found = terms_of({"preset": "icepop"}, tensor(-1.0, -1.0, -1.0, grad=True), behaviour, old=tensor(-1.0, -1.0, -1.0))
    assert found.was_masked.tolist() == [False, True, False]
    assert found.importance.tolist() == pytest.approx([1, 0, 1])
    assert found.terms.tolist() == pytest.approx([-1, 0, -1])


def test_weights_come_from_counts_alone_so_a_rejected_token_does_not_shrink_a_denominator() -> None:
    sample_tokens = tensor(2, 2, 1)
    for aggregation, expected in {
        "token": [1 / 10] * 3,
        "sequence": [1 / 8, 1 / 8, 1 / 4],
        "constant": [1 / 80] * 3,
    }.items():
        weights = token_weights(sample_tokens, aggregation, tokens=10, samples=4, constant=20)  # type: ignore[arg-type]
        assert weights.tolist() == pytest.approx(expected)


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    ratio, advantages = tensor(5.0, 5.0, 2.0, grad=True), tensor(-1.0, 1.0, -1.0)
    found = clipped(ratio, advantages, low=0.2, high=0.2, dual=3.0)
    assert found.terms.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert found.was_clipped.tolist() == [True, True, False]
    found.terms.sum().backward()  # type: ignore[no-untyped-call]
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, 0, 1]


def test_the_clip_is_inclusive_and_counts_what_lost_its_gradient() -> None:
    found = clipped(tensor(1.3, 1.3, 0.7, 0.7, 1.1), tensor(1, -1, 1, -1, 1), low=0.2, high=0.2)
    assert found.was_clipped.tolist() == [True, False, False, True, False]
    assert found.terms.tolist() == pytest.approx([-1.2, 1.3, -0.7, 0.8, -1.1])


def test_topr_tapers_bad_samples_by_the_probability_of_the_whole_sample() -> None:
    new, behaviour = tensor(-2.0, -2.0, -1.0, -1.0, grad=True), tensor(-1.5, -1.0, -1.5, -2.0)
    samples, advantages = torch.tensor([3, 3, 1, 1]), tensor(-1, -1, -1, 1)
    found = topr(new, behaviour, advantages, samples)
    found.terms.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([math.exp(-1.5), math.exp(-1.5), 1, -1])
    assert found.was_clipped.tolist() == [False, False, True, False]


def test_rec_drops_what_ppo_gives_no_gradient_and_weighs_the_rest_by_one() -> None:
    ratios = [1.1, 1.3, 0.5, 1.3, 0.9, 0.7, 0.7]
    advantages = tensor(2.0, 2.0, 2.0, -3.0, -3.0, -3.0, 0.0)
    gradients = {}
    for preset in ("rec", "ppo"):
        new = tensor(*([-1.0] * 7), grad=True)
        found = terms_of({"preset": preset}, new, -1 - tensor(*ratios).log(), advantages=advantages)
        found.terms.sum().backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        gradients[preset] = new.grad
        assert found.was_clipped.tolist() == [False, True, False, False, False, True, False]
        if preset == "rec":
            assert found.terms.tolist() == [2, 0, 2, -3, -3, 0, 0]
    assert gradients["rec"].tolist() == [-2, 0, -2, 3, 3, 0, 0]
    torch.testing.assert_close(gradients["rec"] * tensor(*ratios), gradients["ppo"])


def test_dppo_cuts_only_what_moved_in_the_direction_of_its_advantage() -> None:
    new, behaviour = tensor(-0.1, -0.1, -1.0, -1.0), tensor(-1.0, -1.0, -0.1, -0.1)
    found = dppo_kl(new, behaviour, tensor(1, -1, 1, -1), low=0.01, high=0.01, cap=20.0)
    assert (found.terms == 0).tolist() == [True, False, False, True]
    capped = dppo_kl(tensor(-0.001), tensor(-5.0), tensor(-1.0), low=0.01, high=0.01, cap=20.0)
    assert capped.was_clipped.tolist() == [True]
    assert capped.terms.item() == pytest.approx(20 * -0.001)


def test_kl_in_reward_changes_the_advantage_and_has_no_gradient_of_its_own() -> None:
    new = tensor(-1.0, grad=True)
    changed = kl_in_reward(tensor(0.5), new, tensor(-1.5), coefficient=0.2)
    assert changed.item() == pytest.approx(0.5 - 0.2 * 0.5)
    assert not changed.requires_grad


@given(p=st.lists(st.floats(0.01, 1), min_size=4, max_size=4), q=st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_distillation_over_all_tokens_is_the_exact_divergence_and_the_tail_never_raises_it(
    p: list[float], q: list[float]
) -> None:
    policy, teacher = (torch.tensor([values], dtype=torch.float64) for values in (p, q))
    policy, teacher = (values / values.sum(-1, keepdim=True) for values in (policy, teacher))
    exact = (policy * (policy / teacher).log()).sum().item()
    assert distillation_top_k(policy.log(), teacher.log(), tail=False).item() == pytest.approx(exact, abs=1e-9)
    coarse = distillation_top_k(policy.log()[:, :2], teacher.log()[:, :2]).item()  # the other two are one outcome
    assert -1e-9 <= coarse <= exact + 1e-9


def test_distillation_of_tokens_that_hold_all_probability_has_a_finite_gradient() -> None:
    logits = torch.tensor([[30.0, 0.0]], requires_grad=True)
    distillation_top_k(logits.log_softmax(-1), torch.tensor([[-0.1, -3.0]])).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_value_within_its_clip_has_the_plain_loss_and_one_outside_the_larger_one() -> None:
    predicted, old, returns = tensor(1.1, 2.0, 2.0), tensor(1.0, 1.0, 1.0), tensor(2.0, 3.0, 0.0)
    assert value_loss(predicted, old, returns).tolist() == pytest.approx([0.405, 0.5, 2.0])
    assert value_loss(predicted, old, returns, clip=0.2).tolist() == pytest.approx([0.405, 0.5 * 1.8**2, 2.0])


def test_advantages_of_a_critic_do_not_leak_between_interleaved_samples() -> None:
    rewards, values, samples = tensor(0, 0, 1, 2), tensor(0.5, 0.1, 0.2, 0.3), torch.tensor([7, 2, 7, 2])
    together = generalised_advantages(rewards, values, samples, gamma=0.9, lam=0.8)
    for sample in (7, 2):
        mine = samples == sample
        alone = generalised_advantages(rewards[mine], values[mine], samples[mine], gamma=0.9, lam=0.8)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[mine], other)
    last = 2 - 0.3
    assert together[0].tolist() == pytest.approx(
        [0.9 * 0.2 - 0.5 + 0.72 * 0.8, 0.9 * 0.3 - 0.1 + 0.72 * last, 0.8, last]
    )
    assert [
        len(one) for one in generalised_advantages(*(tensor(),) * 2, torch.zeros(0, dtype=torch.int64), gamma=1, lam=1)
    ] == [0, 0]


def test_the_second_moment_mask_drops_all_tokens_where_none_is_close_enough() -> None:
    assert second_moment_mask(tensor(-1, -1), tensor(-2, -3), most=0.5).tolist() == [False, False]
    assert second_moment_mask(tensor(-1, -1), tensor(-1, -3), most=0.5).tolist() == [True, False]
    assert second_moment_mask(tensor(-1, -1), tensor(-1.5, -1.5), most=0.25).tolist() == [False, False]
    assert second_moment_mask(tensor(), tensor(), most=0.5).tolist() == []


logprobs = st.floats(-8, 0, width=32)
tokens = st.tuples(logprobs, logprobs, st.floats(-3, 3, width=32), st.integers(0, 3))


@given(st.lists(tokens, min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_invariants_of_ratios_masks_and_divergences(rows: list[tuple[float, float, float, int]]) -> None:
    new, old, advantages = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    samples = torch.tensor([row[3] for row in rows])
    assert (k3(new, old) >= -1e-12).all()
    assert (k2(new, old) >= 0).all()
    assert torch.equal(k1(new, old), -k1(old, new))
    ratio = token_ratio(new, old)
    bounded = clipped(ratio, advantages, low=0.2, high=0.28)
    assert (bounded.terms >= -ratio * advantages - 1e-9).all()  # the clip is pessimistic
    whole = sequence_ratio(new, old, samples)
    for sample in {row[3] for row in rows}:
        mine = samples == sample
        assert whole[mine].numpy() == pytest.approx(math.exp((new - old)[mine].mean().item()))
    # a sample's place in the batch, and the order of its tokens, do not matter
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    moved = sequence_ratio(new[order], old[order], samples[order])
    torch.testing.assert_close(moved, whole[order])
    good = geometric(new, old, advantages.abs(), samples, low=0.4, high=0.4)
    assert (good.ratio <= whole + 1e-9).all()
    assert off_policy_mask(new, old, advantages, samples, most=math.inf).all()
    assert (off_policy_mask(new, old, advantages, samples, most=-math.inf) == (advantages >= 0)).all()
