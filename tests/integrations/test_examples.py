"""The parts of the examples for verl and NeMo-RL that need neither: rows, and that the rest compiles."""

import ast
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch

from rollq.consumer import Batch
from support.consumer_groups import random_groups

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = Batch.build(7, random_groups(5))


def rows_of(name: str) -> Callable[[Batch], Any]:
    function: Callable[[Batch], Any] = run_path(str(EXAMPLES / name / "rows.py"))["rows_of"]
    return function


def test_rows_of_verl_hold_the_tokens_masks_and_rewards_of_the_batch() -> None:
    keys, rows, tags = rows_of("verl")(BATCH)
    assert len(set(keys)) == len(keys) == len(rows) == len(tags) == len(BATCH.sequences)
    assert sum(int(row["response_mask"].sum()) for row in rows) == BATCH.counts.loss_tokens
    for key, row, tag, sequence in zip(keys, rows, tags, BATCH.sequences, strict=True):
        uid, sample, segment = key.split("_")
        assert (row["uid"], int(sample), int(segment) + 1) == (uid, sequence.sample, row["num_turns"])
        assert torch.cat([row["prompts"], row["responses"]]).equal(row["input_ids"])
        assert row["input_ids"].tolist() == sequence.ids.tolist()
        assert len(row["rollout_log_probs"]) == len(row["response_mask"]) == tag["response_len"]
        assert float(row["rm_scores"].sum()) == float(row["rm_scores"][-1]) == BATCH.rewards[sequence.sample]
    groups = {row["uid"] for row in rows}
    assert len(groups) == len(BATCH.groups)


def test_rows_of_nemo_rl_hold_the_tokens_masks_and_rewards_of_the_batch() -> None:
    ids, fields = rows_of("nemo_rl")(BATCH)
    assert len(set(ids)) == len(ids) == len(BATCH.sequences)
    assert int(fields["token_mask"].sum()) == BATCH.counts.loss_tokens
    assert fields["total_reward"].tolist() == [BATCH.rewards[one.sample] for one in BATCH.sequences]
    for index, sequence in enumerate(BATCH.sequences):
        length = int(fields["input_lengths"][index])
        assert fields["input_ids"][index, :length].tolist() == sequence.ids.tolist()
        np.testing.assert_array_equal(fields["generation_logprobs"][index, :length], sequence.logprobs)
        assert not fields["token_mask"][index, length:].any()


@pytest.mark.parametrize("name", ["verl/rollq_verl.py", "nemo_rl/rollq_sampler.py"])
def test_the_rest_of_an_example_compiles(name: str) -> None:
    assert ast.parse((EXAMPLES / name).read_text("utf-8"))
