"""The loss: right values, and gradients that do not depend on layout, micro-batches or number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError
from rollq.consumer import AdvantageSettings, Batch
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, policy_loss
from rollq.consumer.objective.token_logprobs import token_logprobs
from support.consumer_groups import make_group, make_sample, make_segment, random_groups
from support.forks import FORKS
from support.gloo_rank import MAX_TOKENS, train_share
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.waiting import PATIENCE_S

VARIANTS = [
    LossSettings(),
    LossSettings(aggregation="sequence", clip_high=0.28),
    LossSettings(aggregation="constant", constant_tokens=12, old_logprobs="recomputed", importance_cap=1.1),
]


def gradient(batch: Batch, settings: LossSettings, *, max_tokens: int = 0, padded: bool = False) -> torch.Tensor:
    """Gradient of the whole batch; `max_tokens` 0 means one padded micro-batch."""
    model = tiny_qwen3()
    micro_batches = batch.micro_batches(max_tokens, padded=padded) if max_tokens else [batch.to_torch()]
    for micro in micro_batches:
        policy_loss(model, micro, settings).backward()  # type: ignore[no-untyped-call]
    return flat_gradient(model)


@pytest.mark.parametrize("settings", VARIANTS)
def test_packed_and_padded_give_the_same_gradient(settings: LossSettings) -> None:
    batch = Batch.build(1, random_groups(5))
    reference = gradient(batch, settings)
    assert reference.abs().max() > 1e-3
    for max_tokens in (25, 100, 10_000):
        for padded in (False, True):
            got = gradient(batch, settings, max_tokens=max_tokens, padded=padded)
            torch.testing.assert_close(got, reference, rtol=0, atol=1e-5)


def test_packed_rows_do_not_see_each_other_under_eager_attention_either() -> None:
    batch = Batch.build(1, random_groups(6))
    [packed] = batch.micro_batches(10_000)
    eager, sdpa = tiny_qwen3(attention="eager"), tiny_qwen3(attention="sdpa")
    torch.testing.assert_close(token_logprobs(eager, packed).logprobs, token_logprobs(sdpa, packed).logprobs)


def test_logprobs_are_those_of_each_sequence_alone_at_its_temperature() -> None:
    model = tiny_qwen3()
    samples = [
        make_sample(make_segment([3, 1, 4], [1, 5, 9, 2]), temperature=0.5),
        make_sample(make_segment([6], [5, 3]), temperature=1.5),
    ]
    batch = Batch.build(1, [make_group(*samples)])
    [packed] = batch.micro_batches(64)
    expected = []
    for index in packed.sequences:
        sequence = batch.sequences[index]
        logits = model(torch.from_numpy(sequence.ids).long()[None]).logits[0] / sequence.temperature
        logprobs = logits.log_softmax(-1)
        expected += [logprobs[t - 1, sequence.ids[t]] for t in range(len(sequence.ids)) if sequence.loss_mask[t]]
    torch.testing.assert_close(token_logprobs(model, packed).logprobs, torch.stack(expected))


def test_token_aggregation_weighs_tokens_and_sequence_aggregation_weighs_samples() -> None:
    model = tiny_qwen3()
    long, short = make_segment([1], [2, 3, 4, 5]), make_segment([1], [6])
    batch = Batch.build(
        1,
        [make_group(make_sample(long, reward=1.0), make_sample(short, reward=0.0))],
        settings=AdvantageSettings(scale="none"),
    )
    micro = batch.to_torch()
    # on policy the ratio is 1 and the loss is minus the weighted advantages (0.5 and -0.5)
    for aggregation, expected in {"token": -0.5 * 3 / 5, "sequence": 0.0, "constant": -0.5 * 3 / (2 * 10)}.items():
        constant = {"constant_tokens": 10} if aggregation == "constant" else {}
        settings = LossSettings.model_validate(
            {"aggregation": aggregation, **constant, "old_logprobs": "recomputed", "importance_cap": 1e9}
        )
        on_policy = token_logprobs(model, micro).logprobs.detach()
        micro.behaviour_logprobs[micro.loss_mask] = on_policy
        assert policy_loss(model, micro, settings).item() == pytest.approx(expected, abs=1e-6)


def one_token(reward: float, behaviour_minus_new: float) -> tuple[torch.nn.Module, Batch]:
    """A sample of one token with advantage `reward`, whose behaviour logprob is off by a known amount."""
    model = tiny_qwen3()

    def batch(logprob: float) -> Batch:
        samples = [make_sample(make_segment([1], [2], logprobs=[logprob]), reward=r) for r in (reward, -reward)]
        return Batch.build(1, [make_group(*samples)], settings=AdvantageSettings(scale="none"))

    new = token_logprobs(model, batch(0.0).to_torch()).logprobs[0].item()
    return model, batch(new + behaviour_minus_new)


def test_the_clip_stops_the_gradient_of_what_went_far_enough() -> None:
    model, batch = one_token(reward=1.0, behaviour_minus_new=-np.log(1.5))  # ratio 1.5 for both samples
    metrics = LossMetrics()
    loss = policy_loss(model, batch.to_torch(), LossSettings(clip_low=0.2, clip_high=0.3), metrics=metrics)
    assert loss.item() == pytest.approx(-(1.3 - 1.5) / 2, abs=1e-5)  # clipped where good, not where bad
    result = metrics.result()
    assert result["clip_fraction"] == pytest.approx(0.5)
    assert result["ratio"] == pytest.approx(1.5, abs=1e-5)


def test_recomputed_logprobs_bring_a_truncated_importance_weight_in_place_of_the_ratio() -> None:
    model, batch = one_token(reward=1.0, behaviour_minus_new=-np.log(3.0))
    weighted = LossMetrics()
    settings = LossSettings(old_logprobs="recomputed", importance_cap=2.0)
    model.zero_grad()
    policy_loss(model, batch.to_torch(), settings, metrics=weighted).backward()  # type: ignore[no-untyped-call]
    capped = flat_gradient(model)
    model.zero_grad()
    policy_loss(model, batch.to_torch(), LossSettings(old_logprobs="recomputed", importance_cap=1.0)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(capped, 2 * flat_gradient(model))
    assert weighted.result()["clip_fraction"] == 0.0


def test_kl_to_the_reference_is_zero_at_the_reference_and_positive_away_from_it() -> None:
    model, batch = one_token(reward=0.0, behaviour_minus_new=0.0)
    micro = batch.to_torch()
    settings = LossSettings(kl_coefficient=0.5)
    same = token_logprobs(model, micro).logprobs.detach()
    assert policy_loss(model, micro, settings, others=OtherLogprobs(reference=same)).item() == pytest.approx(
        0.0, abs=1e-6
    )
    away = policy_loss(model, micro, settings, others=OtherLogprobs(reference=same + 0.3)).item()
    assert away == pytest.approx(0.5 * (np.exp(0.3) - 1.3), abs=1e-5)
    with pytest.raises(ConfigError, match=r"needs the reference's logprobs"):
        policy_loss(model, micro, settings)


@pytest.mark.parametrize("nats", [-400.0, 400.0])
def test_tokens_far_off_policy_have_no_effective_sample_size_and_do_not_stop_the_trainer(nats: float) -> None:
    metrics = LossMetrics()
    mismatch = torch.full((3,), nats)
    metrics.add(
        loss=torch.tensor(0.25),
        ratio=mismatch.exp(),
        was_clipped=torch.zeros(3, dtype=torch.bool),
        mismatch=mismatch,
        staleness=torch.zeros(3, dtype=torch.int32),
        entropy=None,
        sequences=torch.zeros(3, dtype=torch.int64),
        versions=torch.zeros(3, dtype=torch.int32),
    )
    assert np.isnan(metrics.result()["effective_sample_size"]["0"])
    total = metrics.mismatch.labelled(Batch.build(1, random_groups(1))).total()
    assert total is not None
    assert np.isnan(total.effective_sample_size)
    assert total.mean == abs(nats)


def test_metrics_by_staleness_follow_their_formulas() -> None:
    metrics = LossMetrics()
    mismatch = torch.tensor([0.0, 0.1, -0.2, 0.4])
    metrics.add(
        loss=torch.tensor(0.25),
        ratio=mismatch.exp(),
        was_clipped=torch.tensor([False, False, False, True]),
        mismatch=mismatch,
        staleness=torch.tensor([0, 0, 1, 1]),
        entropy=None,
        sequences=torch.tensor([0, 0, 1, 1]),
        versions=torch.tensor([3, 3, 2, 2]),
    )
    result = metrics.result()
    weights = np.exp(mismatch.numpy().astype(np.float64))
    assert result["loss"] == pytest.approx(0.25)
    assert result["staleness_tokens"] == {"0": 2, "1": 2}
    assert result["effective_sample_size"]["1"] == pytest.approx(
        weights[2:].sum() ** 2 / (2 * (weights[2:] ** 2).sum())
    )
    assert result["mismatch_kl"] == pytest.approx((weights - 1 - mismatch.numpy()).mean())
    assert result["on_policy_error"] == pytest.approx(0.1)
    assert result["clip_fraction"] == pytest.approx(0.25)
    assert "entropy" not in result


def test_entropy_of_a_uniform_policy_is_the_log_of_the_vocabulary() -> None:
    model = tiny_qwen3()
    torch.nn.init.zeros_(model.lm_head.weight)
    entropy = token_logprobs(model, Batch.build(1, random_groups(1)).to_torch(), entropy=True).entropy
    assert entropy is not None
    torch.testing.assert_close(entropy, torch.full_like(entropy, np.log(32)))


def test_a_micro_batch_without_loss_tokens_has_a_zero_gradient() -> None:
    model = tiny_qwen3()
    batch = Batch.build(1, [make_group(make_sample(make_segment([1], [2])))], rank=1, world_size=2)
    [micro] = batch.micro_batches(8)
    policy_loss(model, micro, LossSettings()).backward()  # type: ignore[no-untyped-call]
    assert flat_gradient(model).abs().max() == 0


@pytest.mark.parametrize(("how", "world_size"), [("sum_gradients", 2), ("sum_gradients", 4), ("ddp", 2), ("fsdp2", 2)])
def test_ranks_over_gloo_get_the_gradient_and_the_loss_of_one_process(
    how: str, world_size: int, tmp_path: Path
) -> None:
    ranks = [FORKS.Process(target=train_share, args=(rank, world_size, tmp_path, how)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0] * world_size
    metrics, model = LossMetrics(), tiny_qwen3()
    for micro in Batch.build(1, random_groups(7)).micro_batches(MAX_TOKENS):
        policy_loss(model, micro, metrics=metrics).backward()  # type: ignore[no-untyped-call]
    reference = flat_gradient(model)
    for index in range(world_size):
        got = torch.from_numpy(np.load(tmp_path / f"gradient{index}.npy"))
        torch.testing.assert_close(got, reference, rtol=0, atol=1e-6)
    assert sum(float(np.load(tmp_path / f"loss{index}.npy")) for index in range(world_size)) == pytest.approx(
        metrics.loss, abs=1e-6
    )


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_batch_whose_samples_are_all_masked_trains_nothing_and_breaks_nothing(settings: LossSettings) -> None:
    """What the overlong filter leaves of groups in which every answer ran into its limit."""
    segments = [make_segment([1], [2, 3, 4]), make_segment([1], [5])]
    masked = [replace(one, loss_mask=np.zeros(len(one.response_ids), np.bool_)) for one in segments]
    group = make_group(make_sample(masked[0], reward=1.0), make_sample(masked[1], reward=0.0))
    for padded in (False, True):
        batch = Batch.build(1, [group])
        assert gradient(batch, settings, max_tokens=64, padded=padded).abs().max() == 0
        metrics = LossMetrics()
        for micro in batch.micro_batches(64, padded=padded):
            assert policy_loss(tiny_qwen3(), micro, settings, metrics=metrics).item() == 0
        assert all(np.isfinite(value) for value in metrics.result().values() if isinstance(value, float))
