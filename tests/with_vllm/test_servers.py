"""The engine behind HTTP, on real vLLM servers."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Completion, Request, Sampling
from rollq.workers.http.pools import ModelPool, PoolSettings
from support.engine_contract import *  # noqa: F403 - its tests run here
from support.engine_contract import World
from support.pauses import set_pauses
from support.vllm_run import MIXED, TOLERANCE, check, forward_logprobs, random_prompt
from support.vllm_server import VllmServer, until_it_answers, until_they_are

pytest_plugins = "support.vllm_fixtures"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.1, longest_s=1)


@pytest.fixture
def world(models: list[Path], servers: tuple[VllmServer, VllmServer, VllmServer]) -> World:
    one, _, third = ({"urls": [server.url], "server_follows": True} for server in servers)
    return World("openai", one, models[0], third, tells_versions=False)


def test_logprobs_match_a_plain_forward(servers: tuple[VllmServer, VllmServer, VllmServer], models: list[Path]) -> None:
    rng = np.random.default_rng(0)
    requests = [Request(random_prompt(rng, 3 + 17 * (i % 7)), MIXED[i % len(MIXED)]) for i in range(24)]

    async def generate() -> list[Completion]:
        engine = OpenAIEngine(OpenAISettings(urls=tuple(server.url for server in servers[:2])))
        await engine.start()
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.close()

    for request, completion in zip(requests, asyncio.run(generate()), strict=True):
        assert len(completion.ids) > 0
        assert check(request, completion, models) < TOLERANCE


def test_a_pool_tells_the_logprobs_of_its_model(
    servers: tuple[VllmServer, VllmServer, VllmServer], models: list[Path]
) -> None:
    rng = np.random.default_rng(2)
    prompt, response = random_prompt(rng, 12), random_prompt(rng, 30)

    async def ask() -> dict[str, npt.NDArray[Any]]:
        urls = tuple(server.url for server in servers[:2])
        pool = ModelPool("reference", PoolSettings(urls=urls, served_model="tiny", top_k=4))
        try:
            return dict(await pool.score(prompt, response))
        finally:
            await pool.close()

    found, ids = asyncio.run(ask()), np.concatenate([prompt, response])
    expected = forward_logprobs(models[0], ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(found["reference_logprobs"], expected, atol=TOLERANCE)
    assert found["reference_top_ids"].shape == (len(response), 4)
    for rank in range(4):
        for row in (0, 7, len(response) - 1):
            others = np.concatenate([ids[: len(prompt) + row], found["reference_top_ids"][row, [rank]]])
            told = found["reference_top_logprobs"][row, rank]
            np.testing.assert_allclose(told, forward_logprobs(models[0], others)[-1], atol=TOLERANCE)
    assert (np.diff(found["reference_top_logprobs"], axis=1) <= 0).all()


def test_a_pool_says_what_its_model_says(
    servers: tuple[VllmServer, VllmServer, VllmServer], models: list[Path]
) -> None:
    messages = [{"role": "user", "content": "12+34="}]

    async def ask() -> str:
        pool = ModelPool("judge", PoolSettings(urls=(servers[0].url,), served_model="tiny"))
        try:
            return await pool.chat(messages, max_tokens=8, temperature=0.0)
        finally:
            await pool.close()

    tokenizer: Any = AutoTokenizer.from_pretrained(models[0])
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    model: Any = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    said = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert asyncio.run(ask()) == tokenizer.decode(said, skip_special_tokens=True) != ""


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_server_that_is_killed_under_load_loses_nothing_and_comes_back(
    servers: tuple[VllmServer, VllmServer, VllmServer], models: list[Path], whole: bool
) -> None:
    """Whole, or only the process that computes: the other one then tells it in answers that began with status 200."""
    one, other, _ = servers
    rng = np.random.default_rng(1)
    requests = [Request(random_prompt(rng, 20), Sampling(max_tokens=900, seed=seed)) for seed in range(40)]

    async def scene() -> list[Completion]:
        settings = OpenAISettings(urls=(one.url, other.url))
        engine = OpenAIEngine(settings)
        await engine.start()
        await until_they_are(engine, [False, False])
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await until_it_answers(engine, one)
        if whole:
            one.kill()
        else:
            os.kill(one.engine_pid(), signal.SIGKILL)
        completions = await asyncio.gather(*running)
        assert [not server.serving for server in engine._servers.servers] == [True, False]
        if not whole:
            one.kill()
        one.start()
        await asyncio.to_thread(one.wait)
        await until_they_are(engine, [False, False])
        again = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return [*completions, *again]

    for request, completion in zip([*requests, *requests], asyncio.run(scene()), strict=True):
        assert check(request, completion, models) < TOLERANCE
