"""Which forward pass each recorded decision is of: over swaps in the middle of an answer, and over interruptions."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import FinishReason
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.workers.agents.segments import join
from rollq.workers.engines.protocol import Completion, Request, Sampling, WeightsVersion
from rollq.workers.engines.transformers.decode_batch import ActiveSequence, DecodeBatch
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.engines.transformers.expert_recorder import ExpertRecorder
from support.model_families import make_model

PROMPT = np.arange(2, 9, dtype=np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two mixtures of experts with different weights."""
    return [make_model(tmp_path_factory.mktemp(f"moe-{seed}"), "qwen3_moe", seed) for seed in range(2)]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def own_experts(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The experts [T, layers, top_k] of one forward pass without a cache."""
    recorder = ExpertRecorder(model)
    model(input_ids=torch.tensor([ids]), use_cache=False)
    experts: np.ndarray[Any, Any] = recorder.take(1)[0]
    return experts


def test_after_a_swap_only_tokens_that_are_still_to_be_made_have_decisions_of_the_new_weights(
    folders: list[Path],
) -> None:
    old, new = map(load, folders)
    serving = load(folders[0])
    batch = DecodeBatch(serving, frozenset(), lambda ids: "", ExpertRecorder(serving))
    sampling = Sampling(max_tokens=12)
    sequence = ActiveSequence(PROMPT.tolist(), 0, sampling, 5, 12, versions=[(WeightsVersion(1, 0, ""), 0)])
    batch.add([sequence])
    for _ in range(5):
        batch.step()
    serving.load_state_dict(new.state_dict())
    batch.recompute(WeightsVersion(1, 1, ""))
    while not batch.step():
        pass
    completion = sequence.completion(FinishReason.LENGTH)
    ids, recorded = [*PROMPT.tolist(), *completion.ids.tolist()], completion.arrays[ROUTED_EXPERTS]
    assert [span.tokens for span in completion.versions] == [5, 7]
    made_by_old = len(PROMPT) + 5 - 1  # the token before the first one of the new weights was read again by them
    np.testing.assert_array_equal(recorded[:made_by_old], own_experts(old, ids)[:made_by_old])
    np.testing.assert_array_equal(recorded[made_by_old:-1], own_experts(new, ids)[made_by_old:-1])
    assert not recorded[-1].any()


def generate(folder: Path, *requests: Request) -> list[Completion]:
    """The completions of requests that run one after the other."""

    async def run() -> list[Completion]:
        settings = {"model": folder, "device": "cpu", "return_routed_experts": True}
        engine = TransformersEngine(TransformersSettings.model_validate(settings))
        await engine.start()
        completions = [await engine.generate(request) for request in requests]
        await engine.close()
        return completions

    return asyncio.run(run())


def test_a_continued_answer_has_the_experts_of_an_uninterrupted_one(folders: list[Path]) -> None:
    sampling = Sampling(max_tokens=12, seed=3, ignore_eos=True)
    whole, first = generate(folders[0], Request(PROMPT, sampling), Request(PROMPT, replace(sampling, max_tokens=5)))
    (rest,) = generate(folders[0], Request(PROMPT, replace(sampling, max_tokens=7), prefix_ids=first.ids))
    joined = join(PROMPT, join(PROMPT, None, first), rest)
    assert joined.response_ids.tolist() == whole.ids.tolist()
    experts = joined.arrays[ROUTED_EXPERTS]
    assert isinstance(experts, np.ndarray)
    np.testing.assert_array_equal(experts, whole.arrays[ROUTED_EXPERTS])
    assert experts[:-1].all()


def test_a_model_without_experts_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="return_routed_experts: LlamaForCausalLM has no experts"):
        generate(make_model(tmp_path, "llama", seed=0))
