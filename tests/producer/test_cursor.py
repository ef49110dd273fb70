"""The cursor of the prompts lives in Redis and moves with the groups that it admits, whoever asks, dies or asks twice."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from producer_world import TASK, begin, lease, make_run, order, producer, prompt_file, put, task_settings, train
from test_sampler import Rows

from rollq.buffer.errors import StoreLost
from rollq.buffer.replay import Buffer
from rollq.buffer.schema import Prompt, SampleStatus, Status
from rollq.buffer.settings import TaskSettings
from rollq.buffer.values import TrainerEpoch
from rollq.producer.orders import Order, make_order
from rollq.producer.sampler import Sampler

ROWS = 12
BAD = frozenset({3, 8})
PROFILE = settings(derandomize=True, max_examples=60, deadline=None, database=None)

DEED = st.one_of(
    st.tuples(st.sampled_from(["look", "admit", "die"]), st.integers(0, 1), st.integers(1, 6)),
    st.tuples(
        st.sampled_from(["complete", "fail", "abort", "hand_back", "recycle", "train"]), st.just(0), st.integers(1, 5)
    ),
)
