"""Which rollouts a tracker shows, and as what; and which numbers of a line of metrics."""

import math
from dataclasses import replace

from rollq.buffer.values.rollouts import Prompt
from rollq.consumer.batches.batch import Batch
from rollq.consumer.trackers.rollouts import MOST_CHARACTERS, sampled_rollouts
from rollq.consumer.trackers.tracker import scalars
from support.consumer_groups import make_group, make_sample, make_segment, random_groups


def test_the_choice_is_that_of_the_seed_and_the_step() -> None:
    batch = Batch.build(5, random_groups(1))
    chosen = sampled_rollouts(batch, 4, 0)
    assert len(chosen) == 4
    assert sampled_rollouts(Batch.build(5, random_groups(1)), 4, 0) == chosen
    others = [sampled_rollouts(batch, 4, 1), sampled_rollouts(Batch.build(6, random_groups(1)), 4, 0)]
    places = [[(rollout.group, rollout.sample) for rollout in rollouts] for rollouts in (chosen, *others)]
    assert places[0] not in places[1:]
    assert all(place == sorted(place) for place in places)


def test_more_than_there_are_are_all_that_are_trained() -> None:
    batch = Batch.build(5, random_groups(1))
    assert len(sampled_rollouts(batch, 1000, 0)) == int(batch.valid.sum())
    assert sampled_rollouts(batch, 0, 0) == []


def test_a_row_has_the_sample_as_it_is_trained() -> None:
    failed = make_sample(make_segment([1], [2]), reward=None)
    old, new = make_segment([1, 2], [3, 4], version=1), make_segment([5], [6, 7, 8], version=3)
    shown = replace(make_sample(old, new, reward=3.0), text="the answer", reward_parts={"format": 1.0})
    prompt = Prompt(({"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text"}]}))
    group = replace(make_group(failed, shown, make_sample(new, reward=1.0), group_id=9, task="math@1"), prompt=prompt)
    batch = Batch.build(5, [make_group(make_sample(new), group_id=8), group])
    [row] = [rollout for rollout in sampled_rollouts(batch, 10, 0) if rollout.text]
    assert (row.group, row.sample, row.reward, row.parts) == (9, 1, 3.0, {"format": 1.0})
    assert row.prompt == 'system: Add.\nuser: [{"type":"text"}]'
    assert (row.staleness, row.tokens, row.finish_reason) == (3, 5, "stop")
    assert row.advantage == float(batch.advantages[2]) > 0


def test_a_long_text_is_cut_and_says_how_long_it_was() -> None:
    long = replace(make_sample(make_segment([1], [2])), text="x" * (MOST_CHARACTERS + 1))
    [row] = sampled_rollouts(Batch.build(1, [make_group(long)]), 1, 0)
    assert row.text == "x" * MOST_CHARACTERS + "... (20,001 characters)"


def test_numbers_are_flat_finite_and_never_grow_with_workers_or_versions() -> None:
    line = {
        "step": 4, "time_s": 1.7e9, "reward": 0.5, "replayed": True, "note": "text", "nothing": None,
        "rewards": {"math": 1, "code": math.nan}, "workers": {"worker-1": 8},
        "mismatch": {"mean": 0.01, "by_task": {"math": {"p99": 0.1}}, "by_worker": {"w": {"mean": 1.0}},
                     "by_version": {"3": {"mean": 1.0}}},
    }  # fmt: skip
    assert dict(scalars(line)) == {
        "reward": 0.5, "replayed": 1.0, "rewards/math": 1.0, "mismatch/mean": 0.01, "mismatch/by_task/math/p99": 0.1
    }  # fmt: skip
    assert dict(scalars({"step": 4, "held_out": 0.25}, "evaluation/")) == {"evaluation/held_out": 0.25}
