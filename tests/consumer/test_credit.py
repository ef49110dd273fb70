"""Advantages of tokens and turns in batches, and in the reference trainer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from pydantic import ValidationError

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.store.scores import NO_TOKENS
from rollq.buffer.values.rollouts import Float32Array, Group, PipelineOutput, Prompt, Sample
from rollq.buffer.wire.arrays import store_array
from rollq.consumer import AdvantageSettings, Batch, policy_loss
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.trainer import train
from support.consumer_groups import make_group, make_sample, make_segment, random_groups
from support.fed_trainer import fed
from support.finished_groups import finished_sample
from support.manual_worker import HandWorker
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.waiting import PATIENCE_S

CENTRED = AdvantageSettings(scale="none")
ON, OFF = True, False


def rewarded(sample: Sample, values: Sequence[Sequence[float]]) -> Sample:
    """The sample with these rewards of the tokens of its segments."""
    segments = [
        replace(segment, arrays={"token_rewards": np.array(one, np.float32)})
        for segment, one in zip(sample.segments, values, strict=True)
    ]
    return replace(sample, segments=tuple(segments))


def on_last(sample: Sample) -> Sample:
    """The sample with its reward on its last token."""
    values = [np.zeros(len(segment.response_ids)) for segment in sample.segments]
    values[-1][-1] = sample.reward or 0.0
    return rewarded(sample, [one.tolist() for one in values])


def two_turns(first: float, second: float, *, split: bool = False) -> Sample:
    """Two turns of two tokens, with a token of the environment between them; with `split` in two segments."""
    if split:
        segments = (make_segment([1, 2], [3, 4]), make_segment([1, 2, 3, 4, 9], [5, 6]))
        return rewarded(make_sample(*segments, reward=first + second), [[0, first], [0, second]])
    segment = make_segment([1, 2], [3, 4, 9, 5, 6], loss_mask=[ON, ON, OFF, ON, ON])
    return rewarded(make_sample(segment, reward=first + second), [[0, first, 0, 0, second]])


def advantages_of(batch: Batch) -> list[list[float]]:
    """Those of the tokens of each sequence, prompts and padding included."""
    return batch.to_torch().advantages.tolist()


def test_turns_get_what_followed_them_and_prompts_get_none() -> None:
    batch = Batch.build(1, [make_group(two_turns(1, 2), two_turns(0, 1))], settings=CENTRED)
    # returns 3, 2 and 1, 1: the mean is 1.75
    found = advantages_of(batch.with_credit("turns"))
    assert found == [[0, 0, 1.25, 1.25, 1.25, 0.25, 0.25], [0, 0, -0.75, -0.75, -0.75, -0.75, -0.75]]


def test_the_segments_of_a_sample_have_one_return_after_another() -> None:
    batch = Batch.build(1, [make_group(two_turns(1, 2, split=True), two_turns(0, 1))], settings=CENTRED)
    found = batch.with_credit("turns").token_advantages
    assert found[0].tolist() == [0, 0, 1.25, 1.25]
    assert found[1].tolist() == [0, 0, 0, 0, 0, 0.25, 0.25]
    assert found[2].tolist() == [0, 0, -0.75, -0.75, -0.75, -0.75, -0.75]


def test_tokens_have_separate_returns_with_a_discount() -> None:
    samples = [rewarded(make_sample(make_segment([1], [2, 3])), [[1, 2]]) for _ in range(2)]
    batch = Batch.build(1, [make_group(*samples)], settings=CENTRED)
    found = batch.with_credit("tokens", discount=0.25).token_advantages
    assert found[0].tolist() == [0, -0.25, 0.25]


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("kind", ["tokens", "turns"])
def test_rewards_of_last_tokens_train_as_those_of_samples_do(kind: Any, baseline: Any) -> None:
    groups = [
        replace(
            group, samples=tuple(on_last(sample) if sample.reward is not None else sample for sample in group.samples)
        )
        for group in random_groups(4)
    ]
    batch = Batch.build(1, groups, settings=AdvantageSettings(baseline=baseline))
    assert not batch.valid.all()
    micro, credited = batch.to_torch(), batch.with_credit(kind).to_torch()
    torch.testing.assert_close(credited.advantages[micro.loss_mask], micro.advantages[micro.loss_mask])


def test_ranks_and_parts_have_the_advantages_of_the_whole_batch() -> None:
    groups = [make_group(two_turns(i, 2), two_turns(1, i), group_id=i) for i in range(5)]
    whole = Batch.build(1, groups).with_credit("turns")
    for rank in range(2):
        share = Batch.build(1, groups, rank=rank, world_size=2).with_credit("turns")
        assert set(share.token_advantages) >= set(share.share)
        for index in share.share:
            np.testing.assert_array_equal(share.token_advantages[index], whole.token_advantages[index])
    for part in whole.split(2):
        assert part.token_advantages is whole.token_advantages


def test_a_file_beside_redis_may_hold_the_rewards(tmp_path: Path) -> None:
    sample = two_turns(1, 2)
    array = sample.segments[0].arrays["token_rewards"]
    assert isinstance(array, np.ndarray)
    stored = replace(sample.segments[0], arrays={"token_rewards": store_array(tmp_path, array)})
    samples = (replace(sample, segments=(stored,)), two_turns(0, 1))
    batch = Batch.build(1, [make_group(*samples)], settings=CENTRED)
    assert advantages_of(batch.with_credit("turns"))[0][2] == 1.25


def test_a_sample_without_the_array_is_refused_with_the_judge_and_the_setting() -> None:
    batch = Batch.build(3, [make_group(two_turns(1, 2), make_sample(make_segment([1], [2])), group_id=7)])
    with pytest.raises(InvalidGroup) as refused:
        batch.with_credit("turns")
    assert str(refused.value) == (
        "group 7 of task 'math' has no array 'token_rewards', which credit in [trainer] needs: have the task's "
        "judge return Credit(turns=...) or Credit(tokens=...), or set judge_options = { turn_rewards = true } of judge "
        '"environment", or credit = "sample"'
    )


@pytest.mark.parametrize("values", [[0.0], [0.0, float("nan")]])
def test_a_misshapen_array_is_refused(values: list[float]) -> None:
    sample = rewarded(make_sample(make_segment([1], [2, 3])), [values])
    with pytest.raises(
        InvalidGroup, match=r"array 'token_rewards' of shape \[\d\]; expected finite numbers of shape \[2\]"
    ):
        Batch.build(1, [make_group(sample)]).with_credit("turns")


def test_rewards_of_a_pipeline_are_refused() -> None:
    group = replace(make_group(two_turns(1, 2)), shaped=PipelineOutput((1.0,)))
    with pytest.raises(InvalidGroup, match="has rewards of a pipeline, which apply to whole samples"):
        Batch.build(1, [group]).with_credit("turns")


def test_tasks_that_are_left_out_keep_the_advantages_of_their_samples() -> None:
    plain = make_group(make_sample(make_segment([1], [2])), task="demos", group_id=1)
    batch = Batch.build(1, [make_group(two_turns(1, 2), two_turns(0, 1)), plain])
    assert set(batch.with_credit("turns", without={"demos"}).token_advantages) == {0, 1}


# in the reference trainer


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Any:
    def make(**changed: object) -> TrainerSettings:
        return TrainerSettings.model_validate({"model": model_folder, "output": tmp_path, "steps": 4, **changed})

    return make


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"discount": 0.9}, 'discount = 0.9: needs credit = "tokens" or "turns"'),
        ({"credit": "turns", "advantages": {"scale": "batch"}}, 'in advantages cannot be "batch"'),
        ({"credit": "tokens", "loss": "gmpo"}, "loss gmpo has one advantage for each sample"),
    ],
)
def test_settings_that_contradict_credit_are_refused(settings: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**changed)


def trained_advantages(batch: Batch, settings: TrainerSettings) -> list[Float32Array]:
    """The advantages of the loss tokens that the reference trainer computes its gradients with."""
    learner = Learner(settings, None, Ranks())
    return [
        micro.advantages[micro.loss_mask].numpy()
        for part, _ in learner.parts(batch)
        for micro in part.micro_batches(1000, padded=True)
    ]


def test_the_trainer_does_as_the_settings_say(settings: Any) -> None:
    groups = [make_group(two_turns(i, 2), two_turns(1, 0), group_id=i) for i in range(2)]
    batch = Batch.build(1, groups)
    off = trained_advantages(batch, settings())
    np.testing.assert_array_equal(off, trained_advantages(Batch.build(1, random_arrays(groups)), settings()))
    on = trained_advantages(batch, settings(credit="turns", discount=0.5, updates_per_batch=2))
    expected = trained_advantages(batch.with_credit("turns", discount=0.5), settings(updates_per_batch=2))
    np.testing.assert_array_equal(on, expected)
    assert not np.allclose(np.concatenate(on), off[0])


def random_arrays(groups: Sequence[Group]) -> list[Group]:
    """The groups, with rewards of tokens that say something else."""
    samples = [tuple(two_turns(7, -3) for _ in group.samples) for group in groups]
    return [
        replace(
            group,
            samples=tuple(
                replace(one, segments=(replace(one.segments[0], arrays=other.segments[0].arrays),))
                for one, other in zip(group.samples, others, strict=True)
            ),
        )
        for group, others in zip(groups, samples, strict=True)
    ]


def test_tasks_that_are_imitated_need_no_rewards_of_tokens(settings: Any) -> None:
    demos = Group("demos", 9, Prompt("?"), [finished_sample(1.0)], oldest_version=NO_TOKENS, arrival=9, tries=0)
    batch = Batch.build(1, [make_group(two_turns(1, 2), two_turns(0, 1)), demos])
    trained_advantages(batch, settings(credit="turns", loss={"sft": {"demos": 0.1}}))
    with pytest.raises(InvalidGroup, match="group 9 of task 'demos' has no array 'token_rewards'"):
        trained_advantages(batch, settings(credit="turns"))


def test_a_run_trains_on_what_tokens_earned_and_stops_without_it(
    server_url: str, run_name: str, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(steps=2, timeout_s=PATIENCE_S, credit="tokens", discount=0.9, output=tmp_path / "out")
    sample = HandWorker._sample

    def with_rewards(worker: HandWorker, group_id: int, index: int) -> Sample:
        made = sample(worker, group_id, index)
        return rewarded(made, [(segment.response_ids % 2).tolist() for segment in made.segments])

    with fed(server_url, run_name, tmp_path / "plain"), pytest.raises(InvalidGroup, match="has no array"):
        train(Connection(server_url, run_name), chosen)
    monkeypatch.setattr(HandWorker, "_sample", with_rewards)
    with fed(server_url, f"{run_name}-rewarded", tmp_path / "rewarded"):
        assert train(Connection(server_url, f"{run_name}-rewarded"), chosen) == 2
    lines = [orjson.loads(line) for line in (tmp_path / "out" / METRICS_FILE).read_bytes().splitlines()]
    assert all(line["gradient_norm"] > 0 for line in lines)


def test_a_gradient_follows_the_advantages_of_turns() -> None:
    """The turn that earned something is raised, and the other one is not."""
    batch = Batch.build(1, [make_group(two_turns(1, 0), two_turns(0, 0))], settings=CENTRED).with_credit("turns")
    model = tiny_qwen3()
    policy_loss(model, batch.to_torch()).backward()  # type: ignore[no-untyped-call]
    other = tiny_qwen3()
    policy_loss(other, Batch.build(1, batch.groups, settings=CENTRED).to_torch()).backward()  # type: ignore[no-untyped-call]
    assert not torch.allclose(flat_gradient(model), flat_gradient(other), atol=1e-5)


def test_means_of_the_batch_are_refused() -> None:
    batch = Batch.build(1, [make_group(two_turns(1, 2))], settings=AdvantageSettings(scale="batch"))
    with pytest.raises(ConfigError, match="within a group only"):
        batch.with_credit("turns")
