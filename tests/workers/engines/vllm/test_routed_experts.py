"""Routed experts read from outputs of the form that vLLM 0.32 documents; its CPU build cannot return any."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollq.workers.engines.vllm.routed_experts import ExpertShape


@dataclass
class Output:
    """The part of `CompletionOutput` that is read: [tokens read, layers, top_k], from 0."""

    routed_experts: np.ndarray[Any, Any] | None


@dataclass
class Config:
    """The part of `ModelConfig` that is read."""

    experts: int

    def get_total_num_hidden_layers(self) -> int:
        return 2

    def get_num_experts_per_tok(self) -> int:
        return 3

    def get_num_experts(self) -> int:
        return self.experts


def rows(tokens: int) -> np.ndarray[Any, Any]:
    return np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 2, 3)


def test_experts_of_prompt_and_answer_are_numbered_from_one_and_the_last_is_unknown() -> None:
    found = ExpertShape.of(Config(128)).read(Output(rows(6)), 7)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[:6], rows(6) + 1)
    assert not found[6].any()


def test_256_experts_need_two_bytes() -> None:
    output = Output(np.full((1, 2, 3), 255, np.uint8))
    found = ExpertShape.of(Config(256)).read(output, 2)
    assert found.dtype == np.uint16
    assert found[0].tolist() == [[256] * 3] * 2
    assert not found[1].any()


def test_rows_beyond_the_last_token_are_cut_and_missing_ones_are_unknown() -> None:
    shape = ExpertShape.of(Config(128))
    assert len(shape.read(Output(rows(9)), 7)) == 7
    assert not shape.read(Output(rows(9)), 7)[6].any()
    assert not shape.read(Output(rows(4)), 7)[4:].any()
    assert shape.read(Output(None), 7).shape == (7, 2, 3)
    assert not shape.read(Output(None), 7).any()
