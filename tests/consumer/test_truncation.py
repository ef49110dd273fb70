"""Samples of a truncated distribution cause a warning."""

from dataclasses import replace
from typing import Any

import pytest

from rollq.consumer.batches.batch import Batch
from rollq.consumer.trainer.batch_warnings import find_truncation
from support.consumer_groups import make_group, make_sample, make_segment


@pytest.mark.parametrize(
    ("sampling", "warning"),
    [
        ({}, None),
        ({"top_p": 1.0, "top_k": 0}, None),
        ({"top_p": 0.9, "top_k": 0}, "step 3: samples were drawn with top_p = 0.9, top_k = 0."),
        ({"top_p": 1.0, "top_k": 50}, "step 3: samples were drawn with top_p = 1.0, top_k = 50."),
    ],
)
def test_top_p_and_top_k_cause_a_warning_when_they_truncate(sampling: dict[str, Any], warning: str | None) -> None:
    plain = make_sample(make_segment([1], [2, 3]))
    group = make_group(plain, replace(plain, sampling={**plain.sampling, **sampling}))
    found = find_truncation(Batch.build(3, [group]))
    assert (found or "").startswith(warning or "")
    assert (found is None) == (warning is None)
