"""Prompts with images in vLLM: their logprobs are right after every swap.

Of the families with tiny models, only this one runs without torchvision, whose wheels need CUDA.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollq.buffer.images.processor import model_class
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import RequestRefused, SwapMode
from rollq.workers.engines.vllm.api import images_problem
from support.pictures import picture
from support.vision_families import PLACEHOLDERS, make_vision_model
from support.vision_runs import images_of, request, worst_error
from support.vllm_run import TOLERANCE, options, version, with_host

FAMILY = "idefics3"
MARK = PLACEHOLDERS[FAMILY]
SWAPS = ((0, SwapMode.ABORT), (1, SwapMode.ABORT), (2, SwapMode.KEEP), (1, SwapMode.WAIT))


def engine_options(folder: Path) -> dict[str, Any]:
    return options(folder, max_model_len=512, limit_mm_per_prompt={"image": 2})


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_token_after_an_image_has_the_logprob_of_its_weights(recompute: bool, tmp_path: Path) -> None:
    folders = [make_vision_model(tmp_path / str(seed), FAMILY, seed=seed) for seed in range(3)]
    probes = [probe_of(model_class(folder).from_pretrained(folder)) for folder in folders]
    files = picture(20, 30, seed=1), picture(64, 16, seed=2)
    one, two = images_of(folders[0], files[0]), images_of(folders[0], *files)
    requests = [
        request(folders[0], f"{MARK}what?", one),
        request(folders[0], f"a {MARK} and {MARK}: why?", two, seed=1),
        request(folders[0], "no image", None, seed=2),
        request(folders[0], f"{MARK}what?", images_of(folders[0], files[1]), seed=3),
    ]
    long = request(folders[0], f"{MARK}what?", one, tokens=300, seed=4)

    async def scenario(host: EngineHost) -> None:
        for number, mode in SWAPS:
            running = asyncio.create_task(host.generate(long)) if mode is SwapMode.KEEP and recompute else None
            await asyncio.sleep(0.2 if running else 0)
            await host.swap(folders[number], version(number), mode, probes[number])
            made = await asyncio.gather(*map(host.generate, requests))
            worst = max(worst_error(folders, *pair) for pair in zip(requests, made, strict=True))
            if running is not None:
                worst = max(worst, worst_error(folders, long, await running))
            print(f"{mode}: largest error {worst:.1e}")
            assert worst < TOLERANCE

    with_host({**engine_options(folders[0]), "recompute_cache": recompute}, scenario)


def test_images_that_vllm_places_otherwise_are_refused(tmp_path: Path) -> None:
    """The trainer would see another prompt."""
    folder = make_vision_model(tmp_path, FAMILY, seed=0)
    placed = images_of(folder, picture(20, 30, seed=1))
    shorter = replace(placed, tokens=(placed.tokens[0][:-1],))

    async def scenario(host: EngineHost) -> None:
        with pytest.raises(RequestRefused, match="vLLM placed the images differently"):
            await host.generate(request(folder, f"{MARK}?", shorter))
        made = await host.generate(request(folder, f"{MARK}?", placed))
        assert len(made.ids) == 12

    with_host(engine_options(folder), scenario)


@pytest.mark.parametrize(
    ("bidirectional", "on_cpu", "refused"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_models_whose_images_vllm_reads_wrongly_are_refused(bidirectional: bool, on_cpu: bool, refused: bool) -> None:
    config = SimpleNamespace(is_mm_prefix_lm=bidirectional, architectures=["Gemma3ForConditionalGeneration"])
    problem = images_problem(config, on_cpu=on_cpu)
    assert (problem is not None) == refused
    assert problem is None or "Gemma3ForConditionalGeneration wrongly on the CPU" in problem
