"""The transformers engine against a plain forward pass: no cache, no padding, one sequence at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason, Int32Array
from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from rollq.workers.engines.protocol import Completion, EngineDead, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.registry import make_engine
from rollq.workers.engines.transformers.decode_batch import DecodeBatch
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer

VOCABULARY = 258
MIXED = (
    Sampling(max_tokens=12, temperature=1.0),
    Sampling(max_tokens=7, temperature=0.5),
    Sampling(max_tokens=20, temperature=1.7),
    Sampling(max_tokens=9, temperature=1.0, top_k=5),
    Sampling(max_tokens=15, temperature=0.8, top_p=0.6),
    Sampling(max_tokens=11, temperature=1.2, top_k=40, top_p=0.9),
    Sampling(max_tokens=10, temperature=0.9, min_p=0.3),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folders of one model with different weights; version i is at index i."""
    folders = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in range(3)]
    for seed, folder in enumerate(folders):
        save(folder, make_model(VOCABULARY, seed), make_tokenizer())
    return folders


def version(index: int) -> WeightsVersion:
    return WeightsVersion(1, index, f"digest-{index}")


def prompt(rng: np.random.Generator, length: int) -> Int32Array:
    return rng.integers(2, VOCABULARY, length, dtype=np.int32)


def engine_over(folder: Path, max_batch: int = 512) -> TransformersEngine:
    return TransformersEngine(TransformersSettings(model=folder, device="cpu", max_batch=max_batch))


@dataclass(frozen=True)
class Generated:
    request: Request
    completion: Completion


def plain_logprobs(folder: Path, generated: Generated) -> list[float]:
    """Logprob of each generated token under the weights in `folder`, by one forward pass over the whole sequence and an
    independent, per-token truncation."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    request, sampling = generated.request, generated.request.sampling
    prefix = [] if request.prefix_ids is None else request.prefix_ids.tolist()
    context = [*request.prompt_ids.tolist(), *prefix]
    ids = generated.completion.ids.tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    found = []
    for row, token in zip(logits / sampling.temperature, ids, strict=True):
        probabilities = row.double().softmax(-1).tolist()
        ranked = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
        lowest = sampling.min_p * probabilities[ranked[0]]
        kept = [index for index in ranked if probabilities[index] >= lowest][: sampling.top_k or None]
        mass = sum(probabilities[index] for index in kept)
        before = [0.0, *accumulate(probabilities[index] / mass for index in kept)]
        kept = [
            index for index, seen in zip(kept, before, strict=False) if sampling.top_p == 1 or seen < sampling.top_p
        ]
        assert token in kept
        found.append(float(np.log(probabilities[token] / sum(probabilities[index] for index in kept))))
    return found


def check_against_plain_forward(checkpoints: Sequence[Path], generated: Sequence[Generated]) -> None:
    """Every token has the logprob that the weights of the version that it claims give it."""
    for one in generated:
        completion = one.completion
        assert completion.logprobs.dtype == np.float32
        assert completion.ids.dtype == np.int32
        assert sum(span.tokens for span in completion.versions) == len(completion.ids) == len(completion.logprobs)
        start = 0
        for span in completion.versions:
            end = start + span.tokens
            expected = plain_logprobs(checkpoints[span.version], one)
            np.testing.assert_allclose(completion.logprobs[start:end], expected[start:end], atol=1e-4)
            start = end


def test_logprobs_match_a_plain_forward_across_padding_temperatures_and_truncation(checkpoints: list[Path]) -> None:
    rng = np.random.default_rng(0)
    requests = [Request(prompt(rng, 1 + 7 * index % 30), MIXED[index % len(MIXED)]) for index in range(24)]

    async def scenario() -> list[Generated]:
        engine = engine_over(checkpoints[0], max_batch=5)  # so that sequences join and leave all the time
        await engine.start()
        await engine.swap(checkpoints[0], version(0), SwapMode.WAIT)
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return [Generated(*pair) for pair in zip(requests, completions, strict=True)]

    generated = asyncio.run(scenario())
    assert all(span.version == 0 for one in generated for span in one.completion.versions)
    check_against_plain_forward(checkpoints, generated)


def test_logprobs_match_a_plain_forward_when_a_prefix_is_continued(checkpoints: list[Path]) -> None:
    rng = np.random.default_rng(1)
    requests = [
        Request(prompt(rng, 3 + index), MIXED[index % len(MIXED)], prefix_ids=prompt(rng, 1 + 5 * index))
        for index in range(8)
    ]

    async def scenario() -> list[Generated]:
        engine = engine_over(checkpoints[1])
        await engine.start()
        await engine.swap(checkpoints[1], version(1), SwapMode.WAIT)
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return [Generated(*pair) for pair in zip(requests, completions, strict=True)]

    check_against_plain_forward(checkpoints, asyncio.run(scenario()))


def test_logprobs_match_a_plain_forward_across_swaps_that_keep_running_sequences(checkpoints: list[Path]) -> None:
    rng = np.random.default_rng(2)
    long = [
        Request(prompt(rng, 2 + 3 * index), Sampling(max_tokens=60, temperature=0.7 + 0.2 * index))
        for index in range(6)
    ]

    async def scenario() -> list[Generated]:
        engine = engine_over(checkpoints[0])
        await engine.start()
        running = [asyncio.create_task(engine.generate(request)) for request in long]
        for index in (1, 2):
            await engine.generate(Request(prompt(rng, 9), Sampling(max_tokens=8)))  # 8 steps pass for everybody
            await engine.swap(checkpoints[index], version(index), SwapMode.KEEP)
        completions = await asyncio.gather(*running)
        await engine.close()
        return [Generated(*pair) for pair in zip(long, completions, strict=True)]

    generated = asyncio.run(scenario())
    seen = {span.version for one in generated for span in one.completion.versions}
    assert seen == {0, 1, 2}
    check_against_plain_forward(checkpoints, generated)


def test_a_seed_gives_the_same_tokens_whatever_the_batch_and_also_when_continued(checkpoints: list[Path]) -> None:
    rng = np.random.default_rng(3)
    sampling = Sampling(max_tokens=16, seed=-5)
    request = Request(prompt(rng, 6), sampling)
    others = [Request(prompt(rng, 2 + index), Sampling(max_tokens=10)) for index in range(7)]

    async def scenario() -> None:
        engine = engine_over(checkpoints[0])
        await engine.start()
        alone = await engine.generate(request)
        crowded, *_ = await asyncio.gather(*(engine.generate(one) for one in [request, *others]))
        assert alone.ids.tolist() == crowded.ids.tolist()
        continued = await engine.generate(Request(request.prompt_ids, sampling, prefix_ids=alone.ids[:4]))
        assert continued.ids[:12].tolist() == alone.ids[4:].tolist()
        unseeded = [await engine.generate(Request(request.prompt_ids, Sampling(max_tokens=16))) for _ in range(2)]
        assert unseeded[0].ids.tolist() != unseeded[1].ids.tolist()
        await engine.close()

    asyncio.run(scenario())


def test_samples_follow_the_distribution(checkpoints: list[Path]) -> None:
    request = Request(np.array([70, 71], dtype=np.int32), Sampling(max_tokens=1, temperature=0.4))

    async def scenario() -> list[Completion]:
        engine = engine_over(checkpoints[0])
        await engine.start()
        completions = await asyncio.gather(
            *(
                engine.generate(Request(request.prompt_ids, Sampling(1, temperature=0.4, seed=seed)))
                for seed in range(4000)
            )
        )
        await engine.close()
        return completions

    completions = asyncio.run(scenario())
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for completion in completions:
        token = int(completion.ids[0])
        counts[token] = counts.get(token, 0) + 1
        probability[token] = float(np.exp(completion.logprobs[0]))
    for token, expected in sorted(probability.items(), key=lambda item: -item[1])[:10]:
        spread = (expected * (1 - expected) / len(completions)) ** 0.5
        assert abs(counts[token] / len(completions) - expected) < 5 * spread


def test_eos_ids_of_the_generation_config_end_a_sequence_and_are_part_of_it(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    model = make_model(VOCABULARY, seed=0)
    model.generation_config.eos_token_id = list(range(100))
    save(tmp_path, model, make_tokenizer())

    async def scenario() -> list[Completion]:
        engine = engine_over(tmp_path)
        await engine.start()
        request = Request(np.array([200, 201], dtype=np.int32), Sampling(max_tokens=200))
        completions = await asyncio.gather(*(engine.generate(request) for _ in range(20)))
        await engine.close()
        return completions

    for completion in asyncio.run(scenario()):
        assert completion.finish_reason is FinishReason.STOP
        assert completion.ids[-1] < 100
        assert (completion.ids[:-1] >= 100).all()


def test_a_sequence_ends_with_the_tokens_that_it_asks_for(tmp_path: Path) -> None:
    model = make_model(VOCABULARY, seed=0)
    every_token = list(range(VOCABULARY))
    model.generation_config.eos_token_id = every_token
    save(tmp_path, model, make_tokenizer())
    free = Sampling(max_tokens=60, seed=4, ignore_eos=True)
    stopping = replace(free, stop_token_ids=tuple(every_token[:100]))

    async def scenario() -> list[Completion]:
        engine = engine_over(tmp_path)
        await engine.start()
        await engine.swap(tmp_path, version(0), SwapMode.WAIT)
        ask = np.array([40, 41], dtype=np.int32)
        completions = [await engine.generate(Request(ask, sampling)) for sampling in (free, stopping)]
        await engine.close()
        check_against_plain_forward([tmp_path], [Generated(Request(ask, free), one) for one in completions])
        return completions

    continued, stopped = asyncio.run(scenario())
    assert (len(continued.ids), continued.finish_reason) == (60, FinishReason.LENGTH)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.ids.tolist() == continued.ids[: len(stopped.ids)].tolist()
    assert np.flatnonzero(stopped.ids < 100).tolist() == [len(stopped.ids) - 1]


def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(checkpoints: list[Path]) -> None:
    tokenizer = HfTokenizer(checkpoints[0])

    async def scenario() -> None:
        engine = engine_over(checkpoints[0])
        await engine.start()
        free = await engine.generate(Request(np.array([40, 41]), Sampling(max_tokens=40, seed=11)))
        letters = [tokenizer.decode([token]) for token in free.ids.tolist()]
        at = next(index for index, letter in enumerate(letters) if index > 2 and letter.isascii() and letter)
        request = Request(np.array([40, 41]), Sampling(max_tokens=40, seed=11, stop=("never" * 20, letters[at])))
        stopped = await engine.generate(request)
        assert stopped.finish_reason is FinishReason.STOP
        assert len(stopped.ids) == 1 + letters.index(letters[at])
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["missing", "truncated", "lacks a tensor", "unknown tensor", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_keep_serving(
    checkpoints: list[Path], tmp_path: Path, damage: str
) -> None:
    tensors = load_file(checkpoints[1] / "model.safetensors")
    name = sorted(tensors)[0]
    if damage == "lacks a tensor":
        del tensors[name]
    elif damage == "unknown tensor":
        tensors["lm_head.weight"] = torch.zeros(VOCABULARY, 128)
    elif damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif damage == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "missing":
        file.unlink()
    request = Request(np.array([50, 60, 70], dtype=np.int32), Sampling(max_tokens=10, seed=4))

    async def scenario() -> None:
        engine = engine_over(checkpoints[0])
        await engine.start()
        before = await engine.generate(request)
        with pytest.raises(WeightsError, match=str(tmp_path)):
            await engine.swap(tmp_path, version(9), SwapMode.KEEP)
        after = await engine.generate(request)
        assert engine.version.version == 0
        assert before.ids.tolist() == after.ids.tolist()
        np.testing.assert_array_equal(before.logprobs, after.logprobs)
        await engine.close()

    asyncio.run(scenario())


def test_requests_that_can_never_work_are_refused(checkpoints: list[Path]) -> None:
    good = np.array([5, 6], dtype=np.int32)

    async def scenario() -> None:
        engine = engine_over(checkpoints[0])
        await engine.start()
        for ids, sampling, message in (
            (np.full(5000, 7, dtype=np.int32), Sampling(max_tokens=1), "context of 4096"),
            (np.array([5, VOCABULARY], dtype=np.int32), Sampling(max_tokens=1), "token ids"),
            (np.array([-1], dtype=np.int32), Sampling(max_tokens=1), "token ids"),
            (np.array([], dtype=np.int32), Sampling(max_tokens=1), "empty"),
            (good, Sampling(max_tokens=0), "max_tokens"),
            (good, Sampling(max_tokens=1, temperature=0.0), "temperature"),
            (good, Sampling(max_tokens=1, temperature=float("nan")), "temperature"),
            (good, Sampling(max_tokens=1, top_p=0.0), "top_p"),
            (good, Sampling(max_tokens=1, min_p=1.5), "min_p"),
            (good, Sampling(max_tokens=1, bad_words=("no",)), "engine 'transformers' does not support bad_words"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.generate(Request(ids, sampling))
        assert len((await engine.generate(Request(good, Sampling(max_tokens=3)))).ids) == 3
        await engine.close()

    asyncio.run(scenario())


def test_a_step_that_breaks_kills_the_engine_and_every_request_hears_of_it(
    checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(np.array([5, 6], dtype=np.int32), Sampling(max_tokens=3))

    def broken(self: DecodeBatch) -> None:
        raise RuntimeError("out of memory")

    async def scenario() -> None:
        engine = engine_over(checkpoints[0], max_batch=1)
        await engine.start()
        monkeypatch.setattr(DecodeBatch, "step", broken)
        outcomes = await asyncio.gather(*(engine.generate(request) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDead] * 3
        assert "out of memory" in str(outcomes[0])
        with pytest.raises(EngineDead, match="out of memory"):
            await engine.swap(checkpoints[1], version(1), SwapMode.KEEP)
        await engine.close()

    asyncio.run(scenario())


def test_a_sequence_stops_where_the_context_ends(checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        engine = engine_over(checkpoints[0])
        await engine.start()
        completion = await engine.generate(
            Request(np.full(4093, 7, dtype=np.int32), Sampling(max_tokens=50, ignore_eos=True))
        )
        assert (len(completion.ids), completion.finish_reason) == (3, FinishReason.LENGTH)
        await engine.close()

    asyncio.run(scenario())


def test_a_folder_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    engine = make_engine("transformers", {"model": tmp_path})
    with pytest.raises(ConfigError, match=str(tmp_path)):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("vllm2", {}, "unknown engine 'vllm2'"), ("transformers", {}, "model"), ("simulated", {"speed": 3}, "speed")],
)
def test_an_unknown_engine_or_option_is_a_clear_error(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(name, options)


def test_options_that_make_no_sense_are_refused_in_one_line() -> None:
    words = r"^\[worker.options\] of engine 'transformers': max_batch = 0: .*; foo: [^\n]*$"
    with pytest.raises(ConfigError, match=words):
        make_engine("transformers", {"model": "model", "max_batch": 0, "foo": 3})
