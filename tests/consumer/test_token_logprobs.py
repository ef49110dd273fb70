"""Logprobs in chunks: the same values and gradients, and never all logits at once."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollq.buffer.errors import ConfigError
from rollq.consumer import Batch
from rollq.consumer.objective.token_logprobs import check_chunks, token_logprobs
from support.consumer_groups import random_groups
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.untrained_models import FAMILIES, make_model


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the numbers of rows of all tensors whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.rows = vocabulary, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
                self.rows.add(tensor.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_have_the_values_and_the_gradients_of_all_at_once(padded: bool, chunk: int) -> None:
    micro = Batch.build(1, random_groups(4)).micro_batches(10_000, padded=padded)[0]
    found = []
    for size in (0, chunk):
        model = tiny_qwen3()
        got = token_logprobs(model, micro, entropy=True, chunk=size)
        (got.logprobs * torch.arange(len(got.logprobs))).sum().backward()  # type: ignore[no-untyped-call]
        assert got.entropy is not None
        found.append((got.logprobs.detach(), got.entropy, flat_gradient(model)))
    for whole, chunked in zip(*found, strict=True):
        assert (chunked - whole).abs().max() <= 2e-6 * whole.abs().max()


def test_the_logits_of_one_chunk_are_in_memory_at_a_time() -> None:
    micro = Batch.build(1, random_groups(4)).to_torch()
    rows = {}
    for chunk in (0, 5):
        model = make_model("llama")
        with Sizes(model.config.vocab_size) as sizes:
            token_logprobs(model, micro, chunk=chunk).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        rows[chunk] = sizes.rows - {model.config.hidden_size}  # the head itself, transposed
    assert max(rows[5]) <= 5 < int(micro.loss_mask.sum()) <= max(rows[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_family_is_known_to_make_its_logits(family: str) -> None:
    check_chunks(make_model(family).eval())


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = tiny_qwen3()
    forward = model.forward

    def doubled(*args: Any, **options: Any) -> Any:
        found = forward(*args, **options)
        found.logits = found.logits * 2
        return found

    model.forward = doubled
    with pytest.raises(ConfigError, match=r"^logprob_chunk: the logits of Qwen3ForCausalLM .*set logprob_chunk = 0"):
        check_chunks(model)
