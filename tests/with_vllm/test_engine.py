"""The vLLM engine against plain forward passes, and what silently ruins training with vLLM: stale cache, logprobs of
another distribution, half-loaded weights, tokens credited to the wrong version."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason
from rollq.cli.demo.tiny_model import make_tokenizer
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Engine, EngineDead, Request, Sampling, SwapMode
from rollq.workers.engines.registry import make_engine
from rollq.workers.engines.tensors import read_tensors
from support.adapters import lora, merged, without_layer_1
from support.model_families import VOCABULARY
from support.vllm_run import (
    CONTEXT_TOKENS,
    MIXED,
    TOLERANCE,
    SharedEngine,
    check,
    forward_logits,
    options,
    random_prompt,
    version,
)
from support.waiting import PATIENCE_S

pytest_plugins = "support.vllm_fixtures"
LONG_TOKENS = 300
PROMPT = np.array([40, 50, 60], np.int32)
EOS_ID = 1


async def until_they_run(engine: Engine) -> None:
    """Let requests that were made before come so far that they have tokens."""
    await engine.generate(Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=8)))


@pytest.fixture
def engine(shared: SharedEngine, models: list[Path]) -> SharedEngine:
    """Serves the first model as version 0 of epoch 1."""
    shared.begin_at(models[0], version(0))
    return shared


def test_logprobs_match_a_plain_forward_across_batches_temperatures_and_truncation(
    engine: SharedEngine, models: list[Path]
) -> None:
    rng = np.random.default_rng(0)
    requests = [Request(random_prompt(rng, 3 + 17 * (i % 7)), MIXED[i % len(MIXED)]) for i in range(36)]
    requests += [replace(one, prefix_ids=random_prompt(rng, 5)) for one in requests[:6]]

    async def generate() -> list[Completion]:
        return await asyncio.gather(*map(engine.engine.generate, requests))

    for request, completion in zip(requests, engine.run(generate()), strict=True):
        assert check(request, completion, models) < TOLERANCE


@pytest.mark.parametrize("mode", [SwapMode.WAIT, SwapMode.ABORT, SwapMode.KEEP])
def test_logprobs_match_the_weights_that_each_token_claims_across_swaps_under_load(
    engine: SharedEngine, models: list[Path], mode: SwapMode
) -> None:
    """Prompts of several cache blocks, asked again and again: blocks of other weights would be found if any stayed."""
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, 300) for _ in range(4)]
    seen: list[tuple[Request, Completion]] = []

    async def ask(prompt: Any, tokens: int) -> None:
        request = Request(prompt, Sampling(max_tokens=tokens, seed=int(rng.integers(1 << 60))))
        seen.append((request, await engine.engine.generate(request)))

    async def generate() -> None:
        for index in (1, 2, 0):
            running = [asyncio.create_task(ask(prompt, 60 * n)) for prompt in prompts for n in (1, 2, 3)]
            await until_they_run(engine.engine)
            await engine.engine.swap(models[index], version(index), mode)
            await asyncio.gather(*running, *(ask(prompt, 20) for prompt in prompts))

    engine.run(generate())
    assert max(check(request, completion, models) for request, completion in seen) < TOLERANCE
    mixed = sum(len(completion.versions) > 1 for _, completion in seen)
    aborted = sum(completion.finish_reason is FinishReason.ABORT for _, completion in seen)
    assert (mixed > 0, aborted > 0) == (mode is SwapMode.KEEP, mode is SwapMode.ABORT)
    assert {span.version for _, completion in seen for span in completion.versions} == {0, 1, 2}


def test_an_old_cache_that_is_kept_gives_logprobs_of_neither_weights(models: list[Path]) -> None:
    """What `recompute_cache = false` costs, and why it is not the default."""
    rng = np.random.default_rng(2)
    requests = [Request(random_prompt(rng, 64), Sampling(max_tokens=60)) for _ in range(4)]

    async def scenario(engine: Engine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until_they_run(engine)
        await engine.swap(models[1], version(1), SwapMode.KEEP)
        late = await engine.generate(requests[0])
        assert check(requests[0], late, models) < TOLERANCE  # new requests are right: the salt keeps old blocks away
        return list(await asyncio.gather(*running))

    completions = with_engine({**options(models[0]), "recompute_cache": False}, scenario)
    off = max(check(request, completion, models) for request, completion in zip(requests, completions, strict=True))
    print(f"\nrecompute_cache = false: logprobs off by up to {off:.3f} after a swap")
    assert off > 100 * TOLERANCE


def with_engine(options: dict[str, Any], scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        engine = make_engine("vllm", options)
        await engine.start()
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def broken(folder: Path, models: list[Path], how: str) -> Path:
    """A folder with weights that are broken in one way."""
    tensors = load_file(models[1] / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "lacks":
        del tensors[name]
    elif how == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif how == "vocabulary":
        tensors["model.embed_tokens.weight"] = torch.zeros(VOCABULARY + 6, 64)
    elif how == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    if how == "truncated":
        os.truncate(folder / "model.safetensors", 1000)
    elif how == "file":
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("how", ["lacks", "shape", "vocabulary", "unknown", "truncated", "file"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_keep_serving(
    engine: SharedEngine, models: list[Path], tmp_path: Path, how: str
) -> None:
    folder = broken(tmp_path, models, how)
    with pytest.raises(WeightsError, match=str(folder)):
        engine.run(engine.engine.swap(folder, version(1), SwapMode.KEEP))
    request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=5))
    completion = engine.run(engine.engine.generate(request))
    assert completion.versions[0][:2] == (1, 0)
    assert check(request, completion, models) < TOLERANCE


def test_weights_that_vanish_while_a_swap_waits_leave_the_old_ones_serving(
    engine: SharedEngine, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would die of them. Between the first look at a folder and its load, requests may have to end first."""
    folder = tmp_path / "soon-gone"
    shutil.copytree(models[1], folder)

    def look_once(at: Path) -> Any:
        found = read_tensors(at)
        shutil.rmtree(at)
        return found

    monkeypatch.setattr("rollq.workers.engines.vllm.engine.read_tensors", look_once)
    with pytest.raises(WeightsError, match=str(folder)):
        engine.run(engine.engine.swap(folder, version(1), SwapMode.WAIT))
    request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=5))
    assert check(request, engine.run(engine.engine.generate(request)), models) < TOLERANCE


def test_tied_weights_may_come_with_or_without_the_head(
    engine: SharedEngine, models: list[Path], tmp_path: Path
) -> None:
    tensors = load_file(models[1] / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    engine.run(engine.engine.swap(tmp_path, version(1), SwapMode.KEEP))
    request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=5))
    assert check(request, engine.run(engine.engine.generate(request)), models) < TOLERANCE


def test_a_token_outside_the_vocabulary_fails_its_request_alone(engine: SharedEngine) -> None:
    with pytest.raises(ValueError, match=str(VOCABULARY)):
        engine.run(engine.engine.generate(Request(np.array([40, VOCABULARY], np.int32), Sampling(max_tokens=5))))
    engine.run(until_they_run(engine.engine))


def test_a_sequence_stops_where_the_context_ends(engine: SharedEngine) -> None:
    request = Request(np.full(CONTEXT_TOKENS - 7, 40, np.int32), Sampling(max_tokens=50, top_k=1))
    completion = engine.run(engine.engine.generate(request))
    assert (len(completion.ids), completion.finish_reason) == (7, FinishReason.LENGTH)


def test_a_seed_gives_the_same_tokens_whatever_the_batch(engine: SharedEngine) -> None:
    request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=20, seed=(1 << 62) + 5))

    async def twice() -> tuple[Completion, Completion, Completion]:
        alone = await engine.engine.generate(request)
        other = replace(request, sampling=replace(request.sampling, seed=7))
        together = await asyncio.gather(*(engine.engine.generate(one) for one in (request, other, other)))
        return alone, together[0], together[1]

    alone, again, other = engine.run(twice())
    assert alone.ids.tolist() == again.ids.tolist() != other.ids.tolist()


def test_seeds_and_more_prompt_tokens_than_fit_into_a_step_go_together(
    engine: SharedEngine, models: list[Path]
) -> None:
    """vLLM would cut a prompt in two, and its CPU engine dies of that when the request has a seed."""
    rng = np.random.default_rng(4)
    requests = [Request(random_prompt(rng, 900), Sampling(max_tokens=3, seed=seed)) for seed in range(24)]

    async def generate() -> list[Completion]:
        return await asyncio.gather(*map(engine.engine.generate, requests))

    for request, completion in zip(requests, engine.run(generate()), strict=True):
        assert check(request, completion, models) < TOLERANCE


def ask_all(engine: SharedEngine, *samplings: Sampling) -> list[Completion]:
    """The completions of one prompt, sampled in these ways."""
    requests = [Request(PROMPT, sampling) for sampling in samplings]

    async def generate() -> list[Completion]:
        return await asyncio.gather(*map(engine.engine.generate, requests))

    return engine.run(generate())  # type: ignore[no-any-return]


def text_of(completion: Completion) -> str:
    return str(make_tokenizer().decode(completion.ids, skip_special_tokens=True))


def test_logprobs_are_right_after_an_ignored_eos_and_up_to_a_stop_token(
    engine: SharedEngine, models: list[Path]
) -> None:
    free = [Sampling(max_tokens=400, temperature=1.5, ignore_eos=True, seed=seed) for seed in range(4)]
    stopping = [replace(sampling, stop_token_ids=tuple(range(40, 60))) for sampling in free]
    completions = ask_all(engine, *free, *stopping)
    for sampling, completion in zip(free + stopping, completions, strict=True):
        assert check(Request(PROMPT, sampling), completion, models) < TOLERANCE
    continued, stopped = completions[:4], completions[4:]
    assert any(EOS_ID in completion.ids[:-1] for completion in continued)
    for whole, part in zip(continued, stopped, strict=True):
        assert (len(whole.ids), whole.finish_reason, part.finish_reason) == (
            400,
            FinishReason.LENGTH,
            FinishReason.STOP,
        )
        assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
        assert np.flatnonzero((part.ids >= 40) & (part.ids < 60)).tolist() == [len(part.ids) - 1]


def test_logprobs_follow_penalties_and_biases(engine: SharedEngine, models: list[Path]) -> None:
    """Also in evaluations, logprobs are those of the distribution that was sampled."""
    sampling = Sampling(
        max_tokens=60,
        temperature=0.7,
        seed=1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={"70": 4.0, "1": -100.0},
    )
    [completion] = ask_all(engine, sampling)
    ids = np.concatenate([PROMPT, completion.ids])
    for index, logits in enumerate(forward_logits(models[0], ids)[len(PROMPT) - 1 : -1]):
        counts = torch.bincount(torch.from_numpy(completion.ids[:index]).long(), minlength=VOCABULARY)
        seen = counts.bool()
        seen[PROMPT.tolist()] = True
        logits[70] += 4.0
        logits[1] -= 100.0
        logits = torch.where(seen, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        logits = logits - 0.2 * counts - 0.4 * counts.bool()
        expected = (logits / 0.7).log_softmax(-1)[completion.ids[index]]
        assert abs(float(expected) - completion.logprobs[index]) < TOLERANCE


def test_sampling_parameters_for_evaluations_have_their_effects(engine: SharedEngine) -> None:
    base, letters = Sampling(max_tokens=400, seed=2), "abcdefghijklmnopqrstuvwxyz"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    greedy, likeliest, late, clean, matching, json = ask_all(
        engine,
        replace(base, top_k=1),
        replace(base, min_p=1.0),
        replace(base, min_tokens=30, stop_token_ids=tuple(range(100))),
        replace(base, bad_words=tuple(letters), ignore_eos=True),
        replace(base, guided_regex="(ab|ba){5}"),
        replace(base, guided_json=schema),
    )
    assert likeliest.ids.tolist() == greedy.ids.tolist()
    assert (late.ids[:30] >= 100).all()
    assert late.finish_reason is FinishReason.STOP
    assert len(clean.ids) == 400
    assert not set(text_of(clean)) & set(letters)
    assert re.fullmatch("(ab|ba){5}", text_of(matching))
    assert orjson.loads(text_of(json)) in ({"a": 1}, {"a": 2})


def test_sampling_that_vllm_refuses_fails_its_request_alone(engine: SharedEngine) -> None:
    for refused in (Sampling(5, guided_regex="("), Sampling(5, logit_bias={"1000": 1.0}), Sampling(5, temperature=3.0)):
        with pytest.raises(ValueError, match="vLLM refuses"):
            ask_all(engine, refused)
    assert len(ask_all(engine, Sampling(5, ignore_eos=True))[0].ids) == 5


def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(engine: SharedEngine) -> None:
    free = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=30, seed=3))
    letters = engine.run(engine.engine.generate(free)).ids.tolist()
    tokenizer = make_tokenizer()
    index, stop = next(
        (index, text)
        for index, token in enumerate(letters)
        if index >= 3 and (text := str(tokenizer.decode([token]))).isascii() and letters.index(token) == index
    )
    stopped = engine.run(engine.engine.generate(replace(free, sampling=replace(free.sampling, stop=(stop,)))))
    assert stopped.ids.tolist() == letters[: index + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_the_smaller_priority_overtakes(models: list[Path]) -> None:
    order: list[str] = []

    async def scenario(engine: Engine) -> None:
        async def ask(name: str, priority: int, tokens: int = 20) -> None:
            sampling = Sampling(max_tokens=tokens, top_k=1)
            await engine.generate(Request(np.array([40, 50, 60], np.int32), sampling, priority=priority))
            order.append(name)

        await asyncio.gather(ask("running", 0, 600), ask("training", 4), ask("evaluation", 1))

    with_engine(options(models[0], max_num_seqs=1), scenario)
    assert order == ["running", "evaluation", "training"]


def test_an_abort_that_comes_before_vllm_knows_the_request_ends_it_too(engine: SharedEngine) -> None:
    async def scenario() -> Completion:
        request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=900, top_k=1))
        task = asyncio.create_task(engine.engine.generate(request))
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.engine.abort([request])
        return await task

    completion = engine.run(scenario())
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.ids) < 900


def engine_core() -> psutil.Process:
    """vLLM's own process: the youngest child with a model in it."""
    children = psutil.Process().children()
    return max(children, key=lambda child: (child.memory_info().rss > 300 << 20, child.create_time()))


def test_an_engine_that_dies_is_noticed_and_started_again(models: list[Path]) -> None:
    """It dies under requests, and later in a swap. vLLM reports that to its requests only, not to other calls."""

    async def die_in_a_swap(host: EngineHost) -> None:
        core, engine = engine_core(), cast(Any, host._engine)
        core.send_signal(signal.SIGSTOP)
        swap = asyncio.create_task(host.swap(models[2], version(2), SwapMode.KEEP))
        while not engine._process.llm.engine_core.utility_results:
            await asyncio.sleep(0.01)
        core.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(swap, PATIENCE_S)

    async def scenario() -> None:
        host = EngineHost(lambda: make_engine("vllm", options(models[0])), restarts=1)
        await host.start()
        keeping = asyncio.create_task(host.keep_alive())
        try:
            await host.swap(models[1], version(1), SwapMode.WAIT)
            request = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=900, top_k=1))
            running = [asyncio.create_task(host.generate(request)) for _ in range(3)]
            await host.generate(replace(request, sampling=Sampling(max_tokens=5)))
            engine_core().send_signal(signal.SIGKILL)
            results = await asyncio.gather(*running, return_exceptions=True)
            assert [type(one) for one in results] == [EngineDead] * 3
            assert not host.published.is_set()
            while host.version is None:
                await asyncio.sleep(0.05)
            await host.swap(models[1], version(1), SwapMode.WAIT)
            short = replace(request, sampling=Sampling(max_tokens=5))
            assert check(short, await host.generate(short), models) < TOLERANCE
            await die_in_a_swap(host)
            with pytest.raises(EngineDead):
                await host.generate(short)
            with pytest.raises(EngineDead, match="too often"):
                await keeping
        finally:
            keeping.cancel()
            await host.close()

    asyncio.run(scenario())


@pytest.mark.slow  # an engine that is started again is in the test before
def test_requests_that_come_while_vllm_starts_anew_wait_for_it(models: list[Path]) -> None:
    async def scenario() -> None:
        host = EngineHost(lambda: make_engine("vllm", options(models[0])), restarts=0)
        await host.start()
        try:
            await host.swap(models[0], version(0), SwapMode.ABORT)
            request = Request(PROMPT, Sampling(max_tokens=8))
            swap = asyncio.create_task(host.swap(models[1], version(1), SwapMode.RESTART))
            asked = []
            while not swap.done():
                asked.append(asyncio.create_task(host.generate(request)))
                await asyncio.sleep(0.1)
            await swap
            made = await asyncio.gather(*asked)
            assert all(check(request, one, models) < TOLERANCE for one in made)
            assert {span.version for one in made for span in one.versions} >= {1}
        finally:
            await host.close()

    asyncio.run(scenario())


def test_a_model_that_is_not_there_and_arguments_that_vllm_lacks_are_clear_errors(
    models: list[Path], tmp_path: Path
) -> None:
    async def start(options: dict[str, Any]) -> None:
        await make_engine("vllm", options).start()

    with pytest.raises(ConfigError, match="holds no config"):
        asyncio.run(start(options(tmp_path)))
    with pytest.raises(ConfigError, match="no_such_argument"):
        asyncio.run(start(options(models[0], no_such_argument=1)))
    for ours in ("load_format", "logprobs_mode", "skip_tokenizer_init"):
        with pytest.raises(ConfigError, match=ours):
            make_engine("vllm", options(models[0], **{ours: "dummy"}))


def test_an_adapter_per_version_and_old_requests_finish_on_the_old_one(models: list[Path], tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    adapters = [lora(folder(f"adapter-{seed}"), models[0], seed) for seed in (1, 2)]
    folders = [models[0], *(merged(folder(f"merged-{at.name}"), models[0], at) for at in adapters), models[1]]
    request = Request(random_prompt(np.random.default_rng(3), 40), Sampling(max_tokens=LONG_TOKENS, temperature=0.9))

    async def scenario(engine: Engine) -> list[Completion]:
        running = []
        for number, adapter in enumerate(adapters, start=1):
            running.append(asyncio.create_task(engine.generate(request)))
            await until_they_run(engine)
            await engine.swap(adapter, version(number), SwapMode.KEEP)
        longer = replace(request, sampling=replace(request.sampling, max_tokens=900))
        running.append(asyncio.create_task(engine.generate(longer)))
        with pytest.raises(WeightsError, match=r"lacks 'model.layers.1.self_attn.k_proj'.* and 1 more"):
            await engine.swap(without_layer_1(lora(folder("too-short"), models[0], 3)), version(3), SwapMode.KEEP)
        with pytest.raises(WeightsError, match="adapter"):
            await engine.swap(lora(folder("too-large"), models[0], 3, rank=64), version(3), SwapMode.KEEP)
        await until_they_run(engine)
        await engine.swap(models[1], version(3), SwapMode.KEEP)  # waits for those of adapters, whose base it changes
        running.append(asyncio.create_task(engine.generate(request)))
        return list(await asyncio.gather(*running))

    args = options(models[0], enable_lora=True, max_loras=3, max_lora_rank=8)
    completions = with_engine(args, scenario)
    assert [one.versions[0].version for one in completions] == [0, 1, 2, 3]
    assert max(check(request, completion, folders) for completion in completions) < TOLERANCE


@pytest.mark.slow  # adapters of several versions are in the test before
def test_an_adapter_that_vllm_has_no_room_for_serves_after_requests_on_the_others(
    models: list[Path], tmp_path: Path
) -> None:
    """vLLM would drop the adapter of a running request, load it again for the next step, and die when it is gone. On
    the CPU it would give the adapter to a request that has none."""
    adapters = [tmp_path / "adapter-1", tmp_path / "adapter-2"]
    for seed, adapter in enumerate(adapters):
        lora(adapter, models[0], seed)
    merged_folder = tmp_path / "merged"
    merged_folder.mkdir()
    folders = [models[0], merged(merged_folder, models[0], adapters[0])]
    request = Request(random_prompt(np.random.default_rng(5), 40), Sampling(max_tokens=900))

    async def scenario(engine: Engine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(request))]
        await until_they_run(engine)
        await engine.swap(adapters[0], version(1), SwapMode.KEEP)
        running.append(asyncio.create_task(engine.generate(request)))
        await until_they_run(engine)
        await engine.swap(adapters[1], version(2), SwapMode.KEEP)
        shutil.rmtree(adapters[0])
        late = await engine.generate(replace(request, sampling=Sampling(max_tokens=5)))
        assert late.versions[0].version == 2
        return list(await asyncio.gather(*running))

    completions = with_engine(options(models[0], enable_lora=True, max_lora_rank=8), scenario)
    assert [[span.version for span in one.versions] for one in completions] == [[0], [1]]
    assert max(check(request, completion, folders) for completion in completions) < TOLERANCE
