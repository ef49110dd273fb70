"""The engine's logprobs after prompts with images are those of a plain forward pass over the same files."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError
from rollq.buffer.images.processor import ImageProcessor, model_class
from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Engine, WeightsVersion
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.engines.transformers.decode_batch import ActiveSequence, DecodeBatch
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.model_families import make_model
from support.pictures import picture
from support.vision_families import PLACEHOLDERS, make_vision_model
from support.vision_runs import images_of, plain_logprobs, request

FAMILIES = sorted(PLACEHOLDERS)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of a family with different weights."""
    return [make_vision_model(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed) for seed in range(2)]


async def started(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(TransformersSettings(model=folder, device="cpu"))
    await engine.start()
    return engine


def test_samples_of_prompts_with_and_without_images_are_exact(folders: list[Path], family: str) -> None:
    mark = PLACEHOLDERS[family]
    one, two = picture(20, 30, seed=1), picture(64, 16, seed=2)
    requests = [
        request(folders[0], f"{mark}what?", images_of(folders[0], one)),
        request(folders[0], f"a {mark} and a {mark}{mark}: why?", images_of(folders[0], one, two, one), seed=1),
        request(folders[0], "no image at all", None, seed=2),
        request(folders[0], f"{mark}what?", images_of(folders[0], two), seed=3),
    ]

    async def run() -> list[Completion]:
        engine = await started(folders[0])
        completions = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return completions

    for asked, completion in zip(requests, asyncio.run(run()), strict=True):
        expected = plain_logprobs(folders[0], asked, completion.ids.tolist())
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    shown, other = (plain_logprobs(folders[0], requests[place], [65, 66, 67]) for place in (0, 3))
    assert np.abs(shown - other).max() > 0.01, "what is on the image matters"


def test_running_samples_see_their_images_with_new_weights(folders: list[Path], family: str) -> None:
    asked = request(folders[0], f"{PLACEHOLDERS[family]}?", images_of(folders[0], picture(9, 9, seed=1)))
    serving, new = (model_class(folder).from_pretrained(folder, dtype=torch.float32).eval() for folder in folders)
    batch = DecodeBatch(serving, frozenset(), lambda ids: "", processor=lambda: ImageProcessor(folders[0]))
    versions = [(WeightsVersion(1, 0, ""), 0)]
    sequence = ActiveSequence(asked.prompt_ids.tolist(), 0, asked.sampling, 5, 12, versions, asked.images)
    batch.add([sequence])
    for _ in range(5):
        batch.step()
    serving.load_state_dict(new.state_dict())
    batch.recompute(WeightsVersion(1, 1, ""))
    while not batch.step():
        pass
    before, after = (plain_logprobs(folder, asked, sequence.ids) for folder in folders)
    np.testing.assert_allclose(sequence.logprobs, [*before[:5], *after[5:]], atol=1e-4)
    assert np.abs(before - after).max() > 0.1


def test_a_sample_ends_where_its_model_makes_a_token_that_means_an_image(folders: list[Path], family: str) -> None:
    """Read again after a swap, such a token would lack its image, and end the engine."""
    placed = images_of(folders[0], picture(9, 9, seed=1))
    asked = request(folders[0], f"{PLACEHOLDERS[family]}?", placed)
    any_token = replace(asked, images=replace(placed, reserved=frozenset(range(1000))))

    async def run() -> list[Completion]:
        engine = await started(folders[0])
        completions = await asyncio.gather(*map(engine.generate, (any_token, asked)))
        await engine.close()
        return completions

    ended, other = asyncio.run(run())
    assert (ended.finish_reason, len(ended.ids)) == (FinishReason.ERROR, 1)
    assert (other.finish_reason, len(other.ids)) == (FinishReason.LENGTH, 12)


def test_engines_without_images_refuse_them(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model", "llava", seed=0)
    asked = request(folder, "<image>", images_of(folder, picture(9, 9, seed=1)))
    text_only = make_model(tmp_path / "text", "llama", seed=0)
    engines: list[Callable[[], Engine]] = [
        lambda: SimulatedEngine(SimulatedSettings()),
        lambda: TransformersEngine(TransformersSettings(model=text_only, device="cpu")),
    ]

    async def run() -> None:
        for make in engines:
            host = EngineHost(make, restarts=0)
            await host.start()
            with pytest.raises(ValueError, match="the engine takes no images: use 'vllm' or 'transformers'"):
                await host.generate(asked)
            await host.close()

    asyncio.run(run())
    with pytest.raises(ConfigError, match=r"prompts have images, but '.*text' has no processor_config.json"):
        _ = HfTokenizer(text_only).images
