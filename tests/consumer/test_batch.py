"""Groups to sequences and micro-batches: alignment, masks, staleness, counts, named arrays."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import Group, SampleStatus, Segment, VersionSpan
from rollq.consumer import AdvantageSettings, Batch, BatchCounts
from rollq.consumer.batches.sequences import TokenStaleness
from support.consumer_groups import make_group, make_sample, make_segment, random_groups


def test_the_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import rollq.consumer"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entry_t_of_every_array_belongs_to_token_t() -> None:
    segment = make_segment([7, 8], [9, 10, 11], version=2, logprobs=[-0.1, -0.2, -0.3], loss_mask=[True, False, True])
    [sequence] = Batch.build(5, [make_group(make_sample(segment, temperature=0.5))]).sequences
    assert sequence.ids.tolist() == [7, 8, 9, 10, 11]
    assert sequence.loss_mask.tolist() == [False, False, True, False, True]
    np.testing.assert_allclose(sequence.logprobs, [0, 0, -0.1, -0.2, -0.3])
    assert sequence.versions.tolist() == [-1, -1, 2, 2, 2]
    assert sequence.staleness.tolist() == [0, 0, 2, 2, 2]
    assert sequence.temperature == 0.5


def test_a_dead_epoch_counts_as_at_most_its_floor_in_staleness_only() -> None:
    segment = Segment(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array([2, 3, 4], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=(VersionSpan(1, 81, 1), VersionSpan(1, 79, 1), VersionSpan(2, 81, 1)),
    )
    [sequence] = Batch.build(
        82, [make_group(make_sample(segment))], staleness=[TokenStaleness(82, Floors(((1, 80),)))]
    ).sequences
    assert sequence.versions.tolist() == [-1, 81, 79, 81]
    assert sequence.epochs.tolist() == [-1, 1, 1, 2]
    assert sequence.staleness.tolist() == [0, 1, 2, 0]


def test_the_first_token_of_a_sequence_is_never_in_the_loss() -> None:
    [sequence] = Batch.build(1, [make_group(make_sample(make_segment([], [4, 5])))]).sequences
    assert sequence.loss_mask.tolist() == [False, True]


def test_advantages_are_counted_per_sample_not_per_segment() -> None:
    two = make_sample(make_segment([1], [2, 3]), make_segment([1, 2, 3], [4]), reward=1.0)
    one = make_sample(make_segment([1], [5]), reward=0.0)
    batch = Batch.build(1, [make_group(two, one)])
    assert [sequence.sample for sequence in batch.sequences] == [0, 0, 1]
    assert [sequence.sample_loss_tokens for sequence in batch.sequences] == [3, 3, 1]
    np.testing.assert_allclose(batch.advantages, [1, -1], rtol=1e-5)


def test_failed_samples_are_left_out_of_sequences_counts_and_baseline() -> None:
    good = make_sample(make_segment([1], [2, 3]), reward=1.0)
    other = make_sample(make_segment([1], [2]), reward=0.0)
    failed = make_sample(make_segment([1], [2, 3, 4]), reward=None)
    batch = Batch.build(1, [make_group(good, failed, other), make_group(failed, group_id=1)])
    assert batch.valid.tolist() == [True, False, True, False]
    np.testing.assert_allclose(batch.advantages, [1, 0, -1, 0], rtol=1e-5)
    assert (batch.counts.loss_tokens, batch.counts.samples, batch.counts.groups) == (3, 2, 1)
    assert len(batch.sequences) == 2


def test_other_rewards_give_other_advantages() -> None:
    batch = Batch.build(1, random_groups(0))
    swapped = batch.with_rewards(batch.rewards[::-1])
    assert swapped.sequences is batch.sequences
    assert not np.allclose(swapped.advantages, batch.advantages)


def test_the_rewards_of_tasks_are_not_compared_and_those_of_shards_are() -> None:
    def group(task: str, *rewards: float) -> Group:
        return make_group(*[make_sample(make_segment([1], [2]), reward=reward) for reward in rewards], task=task)

    settings = AdvantageSettings(baseline="batch", scale="none")
    groups = [group("math.1of2", 1, 0), group("code", 10, 30), group("math.2of2", 0, 1)]
    batch = Batch.build(1, groups, settings=settings)
    assert batch.advantages.tolist() == [0.5, -0.5, -10, 10, -0.5, 0.5]
    assert batch.with_rewards(2 * batch.rewards).advantages.tolist() == [1, -1, -20, 20, -1, 1]


def test_opo_weighs_the_baseline_by_the_loss_tokens_of_all_segments() -> None:
    long = make_sample(make_segment([1], [2, 3, 4], loss_mask=[True, False, True]), make_segment([1], [2]), reward=1)
    groups = [make_group(long, make_sample(make_segment([1], [2]), reward=0), make_sample(make_segment([1], [2])))]
    batch = Batch.build(1, groups, settings=AdvantageSettings(baseline="opo", scale="none"))
    np.testing.assert_allclose(batch.advantages, [0.2, -0.8, 0.2], rtol=1e-6)  # (3 + 0 + 1) / 5
    np.testing.assert_allclose(batch.with_rewards([0, 1, 0]).advantages, [-0.2, 0.8, -0.2], rtol=1e-6)


def test_packed_micro_batches_hold_whole_sequences_with_their_own_positions() -> None:
    batch = Batch.build(3, random_groups(1))
    seen = 0
    for micro in batch.micro_batches(max_tokens=48):
        assert micro.cu_seqlens is not None
        assert micro.attention_mask is None
        assert micro.input_ids.shape[0] == 1
        assert micro.cu_seqlens.dtype == torch.int32
        for index, start, end in zip(micro.sequences, micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
            sequence = batch.sequences[index]
            assert micro.input_ids[0, start:end].tolist() == sequence.ids.tolist()
            assert micro.position_ids[0, start:end].tolist() == list(range(len(sequence.ids)))
            assert micro.loss_mask[0, start:end].tolist() == sequence.loss_mask.tolist()
            assert micro.behaviour_logprobs[0, start:end].tolist() == sequence.logprobs.tolist()
            assert micro.staleness[0, start:end].tolist() == sequence.staleness.tolist()
            assert set(micro.advantages[0, start:end].tolist()) == {float(batch.advantages[sequence.sample])}
            assert set(micro.sequence_index[0, start:end].tolist()) == {index}
            seen += 1
        assert micro.input_ids.shape[1] <= 48
    assert seen == len(batch.sequences)


def test_to_torch_pads_a_sequence_per_row() -> None:
    batch = Batch.build(3, random_groups(1))
    padded = batch.to_torch()
    assert padded.attention_mask is not None
    assert padded.cu_seqlens is None
    assert padded.input_ids.shape == (len(batch.sequences), max(len(s.ids) for s in batch.sequences))
    for row, index in enumerate(padded.sequences):
        length = len(batch.sequences[index].ids)
        assert padded.input_ids[row, :length].tolist() == batch.sequences[index].ids.tolist()
        assert padded.attention_mask[row].sum() == length
        assert not padded.loss_mask[row, length:].any()
        assert (padded.versions[row, length:] == -1).all()


def test_every_rank_has_as_many_micro_batches_and_their_loss_tokens_add_up() -> None:
    shares = [Batch.build(1, random_groups(2), rank=rank, world_size=4).micro_batches(40) for rank in range(4)]
    assert len({len(share) for share in shares}) == 1
    counts = shares[0][0].counts
    assert sum(int(micro.loss_mask.sum()) for share in shares for micro in share) == counts.loss_tokens


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_parts_of_a_batch_train_each_group_once_with_counts_of_their_own(ranks: int) -> None:
    groups = [*random_groups(2), *(replace(group, task="code") for group in random_groups(3, 4))]
    batches = [Batch.build(1, groups, rank=rank, world_size=ranks) for rank in range(ranks)]
    whole = batches[0]
    for parts in (1, 2, 3, 10):
        split = [batch.split(parts) for batch in batches]
        assert sorted(index for mine in split for part in mine for index in part.share) == list(
            range(len(whole.lengths))
        )
        for number in range(parts):
            micro_batches = [micro for mine in split for micro in mine[number].micro_batches(60)]
            counts = micro_batches[0].counts
            assert sum(int(micro.loss_mask.sum()) for micro in micro_batches) == counts.loss_tokens
            trained = set(whole.sample_groups[whole.valid].tolist())
            assert counts.groups == len(trained & set(range(number, 10, parts)))
            assert all(micro.task_counts == split[0][number].task_counts for micro in micro_batches)
        for name, counts in whole.task_counts.items():
            assert sum((part.task_counts.get(name, BatchCounts()) for part in split[0]), BatchCounts()) == counts
    for parts in (0, 11):
        with pytest.raises(ConfigError, match=rf"^split\({parts}\): the batch of step 1 has 10 groups, and every part"):
            whole.split(parts)


def test_tokens_know_their_sample_and_their_task() -> None:
    groups = [*random_groups(2, 2), *(replace(group, task="code") for group in random_groups(3, 2))]
    batch = Batch.build(1, groups)
    assert list(batch.task_counts) == ["code", "math"]
    for micro in (batch.to_torch(), *batch.micro_batches(60)):
        for row, column in (micro.sequence_index >= 0).nonzero().tolist():
            sequence = batch.sequences[int(micro.sequence_index[row, column])]
            assert int(micro.sample_index[row, column]) == sequence.sample
            assert list(micro.task_counts)[int(micro.task_index[row, column])] == sequence.task
        assert bool(((micro.sequence_index < 0) == (micro.task_index < 0)).all())


def test_tokens_may_have_advantages_of_their_own() -> None:
    batch = Batch.build(1, random_groups(2))
    length = int(batch.lengths[3])
    changed = batch.with_token_advantages({3: np.arange(length)})
    for micro in changed.micro_batches(60):
        for row, column in (micro.sequence_index >= 0).nonzero().tolist():
            index = int(micro.sequence_index[row, column])
            expected = (
                float(micro.position_ids[row, column])
                if index == 3
                else batch.advantages[batch.sequences[index].sample]
            )
            assert float(micro.advantages[row, column]) == pytest.approx(float(expected))
    for wrong in (np.ones(length + 1), np.ones((length, 1)), np.full(length, np.nan)):
        with pytest.raises(ValueError, match=f"^sequence 3 needs {length} finite advantages, one per token"):
            batch.with_token_advantages({3: wrong})
    assert not changed.with_rewards(batch.rewards).token_advantages


def test_a_rank_without_sequences_gets_one_masked_token() -> None:
    groups = [make_group(make_sample(make_segment([1], [2])))]
    [micro] = Batch.build(1, groups, rank=1, world_size=2).micro_batches(8)
    assert micro.input_ids.shape == (1, 1)
    assert not micro.loss_mask.any()


def test_named_arrays_per_token_reach_the_micro_batch_aligned() -> None:
    response = {"reference": np.array([5.0, 6.0], np.float32)}
    whole = {"reference": np.array([1.0, 2.0, 3.0], np.float32)}
    samples = (make_sample(make_segment([1], [2, 3], arrays=arrays)) for arrays in (response, whole))
    padded = Batch.build(1, [make_group(*samples)]).to_torch(arrays=["reference"])
    assert sorted(padded.arrays["reference"].tolist()) == [[0.0, 5.0, 6.0], [1.0, 2.0, 3.0]]


def test_named_arrays_of_any_further_shape_keep_it() -> None:
    routed = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    [micro] = Batch.build(
        1, [make_group(make_sample(make_segment([1], [2, 3], arrays={"routed": routed})))]
    ).micro_batches(8, arrays=["routed"])
    assert micro.arrays["routed"].dtype == torch.uint8
    assert micro.arrays["routed"][0, 1:].tolist() == routed.tolist()


def test_a_missing_or_misshapen_array_is_named() -> None:
    batch = Batch.build(
        1, [make_group(make_sample(make_segment([1], [2, 3], arrays={"image": np.zeros(9)})), group_id=4)]
    )
    with pytest.raises(InvalidGroup, match=r"group 4.*no array 'teacher'.*\['image'\]"):
        batch.to_torch(arrays=["teacher"])
    with pytest.raises(InvalidGroup, match=r"'image'.*shape \(9,\).*2 response tokens"):
        batch.to_torch(arrays=["image"])


def test_a_sequence_longer_than_a_micro_batch_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        Batch.build(1, [make_group(make_sample(make_segment([1], [2, 3])))]).micro_batches(2)


def test_xb17_tokens_past_their_threshold_are_masked_out_of_the_loss_and_nothing_is_changed() -> None:
    spans = (VersionSpan(1, 0, 1), VersionSpan(1, 4, 1))
    semantic = np.array([True, True])
    one = replace(make_segment([5], [6, 7]), versions=spans, loss_mask=semantic)
    for threshold, expected in ((4, [False, False, True]), (8, [False, True, True])):
        batch = Batch.build(5, [make_group(make_sample(one))], staleness=[TokenStaleness(5, threshold=threshold)])
        (sequence,) = batch.sequences
        assert sequence.loss_mask.tolist() == expected
        assert batch.counts.loss_tokens == sum(expected)
        assert sequence.sample_loss_tokens == sum(expected)
    assert semantic.tolist() == [True, True]


def test_xb17_the_mask_of_age_is_added_to_what_the_environment_wrote() -> None:
    spans = (VersionSpan(1, 0, 2), VersionSpan(1, 4, 2))
    one = replace(make_segment([5], [1, 2, 3, 4], loss_mask=[True, False, True, False]), versions=spans)
    (sequence,) = Batch.build(5, [make_group(make_sample(one))], staleness=[TokenStaleness(5, threshold=4)]).sequences
    assert sequence.loss_mask.tolist() == [False, False, False, True, False]


def test_xb17_a_sample_with_its_own_labels_is_exempt() -> None:
    one = make_segment([5], [6, 7], arrays={"labels": np.array([6, 7])})
    (sequence,) = Batch.build(5, [make_group(make_sample(one))], staleness=[TokenStaleness(5, threshold=4)]).sequences
    assert sequence.loss_mask.tolist() == [False, True, True]


def test_xb17_tokens_of_dead_epochs_are_as_old_as_they_count() -> None:
    one = make_segment([5], [6], version=9)
    ages = TokenStaleness(5, Floors(((1, 0),)), 4)
    batch = Batch.build(5, [make_group(make_sample(one))], staleness=[ages])
    assert batch.counts.loss_tokens == 0


def test_the_mean_reward_leaves_samples_out_that_failed() -> None:
    segment = make_segment([1], [2])
    failed = replace(make_sample(segment, reward=1.0), status=SampleStatus.FAILED)
    batch = Batch.build(1, [make_group(make_sample(segment, reward=0.5), make_sample(segment, reward=1.0), failed)])
    assert batch.rewards.tolist() == [0.5, 1.0, 0.0]
    assert batch.mean_reward == 0.75
    assert np.isnan(Batch.build(1, [make_group(failed)]).mean_reward)
