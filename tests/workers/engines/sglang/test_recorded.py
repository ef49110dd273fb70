"""The engine over SGLang, against exchanges that were recorded from SGLang 0.5.23."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.buffer.weights.probe import Probe
from rollq.workers.engines.openai.servers import RequestFailed
from rollq.workers.engines.protocol import Completion, EngineDead, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.registry import make_engine
from rollq.workers.engines.sglang.engine import SglangEngine
from rollq.workers.engines.sglang.generate_api import read_context, read_dtype, read_part, read_scores, score_body
from rollq.workers.engines.weights_check import WeightsRejected
from rollq.workers.run import make_tokenizer
from rollq.workers.settings import WorkerSettings
from support.pauses import set_pauses
from support.recorded_sglang import EXCHANGES, STREAM, RecordedServer
from support.waiting import PATIENCE_S

RETRIES = 3
ASK = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=3, seed=7))
IDS = [event["output_ids"][0] for event in STREAM]
FIRST, SECOND = WeightsVersion(1, 0, "a" * 64), WeightsVersion(1, 1, "b" * 64)
Two = tuple[RecordedServer, RecordedServer]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.001, longest_s=0.002)


@pytest.fixture
def server() -> Iterator[RecordedServer]:
    with RecordedServer() as server:
        yield server


@pytest.fixture
def two() -> Iterator[Two]:
    with RecordedServer() as one, RecordedServer() as other:
        yield one, other


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"model.norm.weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def with_engine(scenario: Callable[[SglangEngine], Awaitable[None]], *served: RecordedServer, **options: Any) -> None:
    """Run `scenario` over an engine with these servers. With `push_model` they hold the first weights."""

    async def run() -> None:
        engine = make_engine("sglang", {"urls": [server.url for server in served], "retries": RETRIES, **options})
        assert isinstance(engine, SglangEngine)
        await engine.start()
        try:
            if "push_model" in options:
                await engine.swap(options["push_model"], FIRST, SwapMode.WAIT)
            await until_in(engine, len(served))
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def until_in(engine: SglangEngine, servers: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(engine._servers.serving) != servers:
            await asyncio.sleep(0.005)


def ask(server: RecordedServer, *plan: str, request: Request = ASK, **options: Any) -> Completion:
    """The completion of one request that meets `plan`."""
    server.plan.extend(plan)
    answers: list[Completion] = []

    async def scenario(engine: SglangEngine) -> None:
        answers.append(await engine.generate(request))

    with_engine(scenario, server, **options)
    return answers[0]


def test_token_ids_go_in_and_token_ids_logprobs_and_versions_come_out(server: RecordedServer) -> None:
    completion = ask(server)
    assert completion.ids.tolist() == IDS
    logprobs = [event["meta_info"]["output_token_logprobs"][0][0] for event in STREAM]
    np.testing.assert_allclose(completion.logprobs, logprobs)
    assert completion.versions == (VersionSpan(0, 0, 3),)
    assert completion.finish_reason is FinishReason.LENGTH
    [body] = server.bodies
    assert body == {
        "input_ids": [40, 50, 60], "return_logprob": True, "return_sampling_mask": False, "stream": True, "priority": 0,
        "extra_key": "0.0",
        "sampling_params": {
            "max_new_tokens": 3, "min_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": [],
            "stop_token_ids": None, "ignore_eos": False, "logit_bias": None, "json_schema": None, "regex": None,
            "sampling_seed": 7, "n": 1,
        },
    }  # fmt: skip


def test_filters_are_sent_with_a_wish_for_logprobs_after_them(server: RecordedServer) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.5, top_p=0.9, top_k=40)
    completion = ask(server, "stream with a mask", request=replace(ASK, sampling=sampling, priority=3))
    [body] = server.bodies
    assert body["return_sampling_mask"]
    assert body["priority"] == -3
    sampled = [
        event["meta_info"]["output_token_sampling_logprobs"][0] for event in EXCHANGES["stream with a mask"]["events"]
    ]
    np.testing.assert_allclose(completion.logprobs, sampled)


def test_rare_sampling_parameters_have_the_names_of_sglang(server: RecordedServer) -> None:
    rare = Sampling(
        max_tokens=3, min_p=0.1, min_tokens=9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"40": -3.0}, ignore_eos=True, stop_token_ids=(7, 8), guided_json={"type": "object"},
    )  # fmt: skip
    ask(server, request=replace(ASK, sampling=rare, prefix_ids=np.array([70], np.int32)))
    [body] = server.bodies
    sent = body["sampling_params"]
    assert body["input_ids"] == [40, 50, 60, 70]
    assert (sent["min_p"], sent["min_new_tokens"], sent["ignore_eos"]) == (0.1, 3, True)
    assert (sent["stop_token_ids"], sent["logit_bias"]) == ([7, 8], {"40": -3.0})
    assert sent["json_schema"] == '{"type":"object"}'
    with pytest.raises(ValueError, match="'sglang' does not support bad_words"):
        ask(server, request=replace(ASK, sampling=Sampling(max_tokens=3, bad_words=("no",))))


def test_a_stop_token_is_part_of_the_answer(server: RecordedServer) -> None:
    completion = ask(server, "stream that stops")
    assert (completion.ids.tolist(), completion.finish_reason) == ([38], FinishReason.STOP)


@pytest.mark.parametrize("word", ["stream without a top_k", "stream of too many tokens", "400"])
def test_a_refusal_fails_the_sample_at_once_with_the_servers_words(server: RecordedServer, word: str) -> None:
    with pytest.raises(ValueError, match=r"refuses the request: HTTP 400: .*(top_k|maximum context|said)"):
        ask(server, word)
    assert len(server.bodies) == 1


def test_the_longest_prompt_is_the_one_that_the_server_reports(server: RecordedServer) -> None:
    assert read_context(server.info) == 4091
    with pytest.raises(ValueError, match="context of 4091"):
        ask(server, request=replace(ASK, prompt_ids=np.full(4091, 7, np.int32)))


@pytest.mark.parametrize("failure", ["500", "503", "429", "broken"])
def test_what_may_pass_is_tried_again(server: RecordedServer, failure: str) -> None:
    assert ask(server, failure, failure).ids.tolist() == IDS
    assert len(server.bodies) == 3


def test_a_request_that_never_succeeds_fails_alone(server: RecordedServer) -> None:
    with pytest.raises(RequestFailed, match="said 500"):
        ask(server, *["500"] * 4)


def test_an_answer_that_the_server_aborts_keeps_its_tokens() -> None:
    [event] = EXCHANGES["aborted stream"]["events"]
    part = read_part(event, 28)
    assert (part.ids, part.reason) == (event["output_ids"], "abort")
    with pytest.raises(ValueError, match="2 token ids and 2 logprobs after 27 tokens, of 30"):
        read_part(event, 27)


def test_an_abort_keeps_the_tokens_that_have_come_and_frees_the_request(server: RecordedServer) -> None:
    async def scenario(engine: SglangEngine) -> None:
        server.plan.append("hang")
        running = asyncio.create_task(engine.generate(ASK))
        assert await asyncio.to_thread(server.hanging.acquire, timeout=PATIENCE_S)
        while not any(call.tokens.ids for call in engine._gate.calls):
            await asyncio.sleep(0.001)
        await engine.abort([ASK])
        completion = await running
        assert (completion.ids.tolist(), completion.finish_reason) == (IDS[:1], FinishReason.ABORT)
        assert await asyncio.to_thread(server.freed.acquire, timeout=PATIENCE_S)

    with_engine(scenario, server)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"incremental_streaming_output": False}, "start SGLang with --incremental-streaming-output"),
        ({"max_req_input_len": None}, "does not report max_req_input_len"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(
    server: RecordedServer, change: dict[str, Any], problem: str
) -> None:
    server.info |= change
    with pytest.raises(ConfigError, match=f"engine 'sglang'.*{problem}"):
        ask(server)


def test_a_server_without_logprobs_of_what_was_sampled_is_refused(server: RecordedServer) -> None:
    server.probe = EXCHANGES["answer"]["answer"]
    with pytest.raises(ConfigError, match=r"no output_token_logprobs or output_token_sampling_logprobs"):
        ask(server)
    info = {**EXCHANGES["probe"]["answer"]["meta_info"], "output_token_logprobs": [[-3.4, 149, None]] * 3}
    server.probe = {**EXCHANGES["probe"]["answer"], "meta_info": info}
    with pytest.raises(ConfigError, match="start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        ask(server)


def test_a_start_warns_that_no_gpu_was_tried(server: RecordedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ask(server)
    assert "never on a GPU" in caplog.text


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(ConfigError, match="engine 'sglang' needs the folder"):
        make_tokenizer(WorkerSettings(engine="sglang"))


def test_weights_are_loaded_while_the_server_is_paused_and_named_when_they_are_whole(
    server: RecordedServer, model: Path
) -> None:
    async def scenario(engine: SglangEngine) -> None:
        assert server.calls == [
            "server_info",
            "continue_generation",
            "server_info",
            "model_info",
            "update_weight_version loading",
            "pause_generation abort",
            f"update_weights_from_disk {model} True",
            "continue_generation",
            f"update_weight_version 1.0.{16 * 'a'}",
        ]
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 0, 3),)
        await engine.swap(model, SECOND, SwapMode.KEEP)
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 1, 3),)
        assert [body["extra_key"] for body in server.bodies] == ["1.0", "1.1"]

    with_engine(scenario, server, push_model=model)


def test_a_request_that_a_swap_interrupts_is_continued_by_the_new_weights(server: RecordedServer, model: Path) -> None:
    async def scenario(engine: SglangEngine) -> None:
        server.plan.append("hang")
        running = asyncio.create_task(engine.generate(replace(ASK, sampling=Sampling(max_tokens=4, seed=7))))
        while not any(call.tokens.ids for call in engine._gate.calls):
            await asyncio.sleep(0.001)
        await engine.swap(model, SECOND, SwapMode.KEEP)
        completion = await running
        assert completion.ids.tolist() == [*IDS[:1], *IDS]
        assert completion.versions == (VersionSpan(1, 0, 1), VersionSpan(1, 1, 3))
        assert server.bodies[1]["input_ids"] == [40, 50, 60, *IDS[:1]]
        assert server.bodies[1]["sampling_params"]["max_new_tokens"] == 3

    with_engine(scenario, server, push_model=model)


def test_a_server_that_does_not_load_gets_no_requests_until_it_has(two: Two, model: Path) -> None:
    one, other = two

    async def scenario(engine: SglangEngine) -> None:
        one.weight_plan.extend(["not loaded"] * 10_000)
        await engine.swap(model, SECOND, SwapMode.WAIT)
        assert (one.weight_version, one.paused) == ("loading", True)
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 1, 3),)
        assert (len(one.bodies), len(other.bodies)) == (0, 1)
        one.weight_plan.clear()
        await until_in(engine, 2)
        assert one.weight_version == f"1.1.{16 * 'b'}"

    with_engine(scenario, *two, push_model=model)


def test_an_engine_whose_servers_do_not_take_the_weights_is_dead(server: RecordedServer, model: Path) -> None:
    async def scenario(engine: SglangEngine) -> None:
        engine._settings = engine._settings.model_copy(update={"start_timeout_s": 1})
        server.weight_plan.extend(["not loaded"] * 10_000)
        with pytest.raises(EngineDead, match="no server took the weights of version 1"):
            await engine.swap(model, SECOND, SwapMode.WAIT)

    with_engine(scenario, server, push_model=model)


def test_a_server_that_was_started_again_is_given_the_weights_before_a_request(
    server: RecordedServer, model: Path
) -> None:
    async def scenario(engine: SglangEngine) -> None:
        server.restart()
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 0, 3),)
        assert server.weight_version == f"1.0.{16 * 'a'}"

    with_engine(scenario, server, push_model=model)


def test_tokens_of_weights_that_nobody_announced_are_dropped(server: RecordedServer, model: Path) -> None:
    """A second request runs, so that the server is not asked for its weights before the first."""

    async def scenario(engine: SglangEngine) -> None:
        server.plan.append("hang")
        other = asyncio.create_task(engine.generate(replace(ASK)))
        assert await asyncio.to_thread(server.hanging.acquire, timeout=PATIENCE_S)
        server.weight_version = "another"
        completion = await engine.generate(ASK)
        assert completion.ids.tolist() == IDS
        assert server.weight_version == f"1.0.{16 * 'a'}"
        assert len(server.bodies) == 3
        other.cancel()

    with_engine(scenario, server, push_model=model)


def test_a_server_restarted_with_other_weights_stays_out_where_none_are_pushed(two: Two) -> None:
    one, other = two

    async def scenario(engine: SglangEngine) -> None:
        one.plan.append("500")
        one.top_nats = -0.1
        for _ in range(3):
            assert (await engine.generate(ASK)).ids.tolist() == IDS
        assert [server.serving for server in engine._servers.servers] == [False, True]
        one.top_nats = 0.0
        await until_in(engine, 2)
        assert len(other.bodies) == 3

    with_engine(scenario, one, other)


def test_logprobs_of_a_prompt_are_read_as_sglang_gives_them() -> None:
    recorded, prompt = EXCHANGES["scores"], np.array([40, 50, 60], np.int32)
    body = score_body(prompt)
    assert {name: body[name] for name in ("return_logprob", "logprob_start_len")} == {
        "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    assert body["sampling_params"]["max_new_tokens"] == recorded["request"]["sampling_params"]["max_new_tokens"] == 0
    np.testing.assert_allclose(read_scores(recorded["answer"], prompt), [-6.5662093, -5.6000695])
    for answer in (EXCHANGES["answer"]["answer"], {}, None, {"meta_info": {"input_token_logprobs": [1, 2, 3]}}):
        with pytest.raises(ValueError, match="no input_token_logprobs for every token"):
            read_scores(answer, prompt)
    with pytest.raises(ValueError, match="no input_token_logprobs for every token"):
        read_scores(recorded["answer"], prompt[:2])


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        ({"dtype": "float32", "quantization": None}, "float32"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": "auto"}, None),
        ({}, None),
        ({"dtype": "auto", "quantization": "fp8"}, "fp8"),
    ],
)
def test_the_dtype_is_the_one_that_the_server_reports(info: dict[str, Any], dtype: str | None) -> None:
    assert read_dtype(info) == dtype


def test_a_server_with_other_logprobs_than_the_weights_gets_no_requests(two: Two, model: Path) -> None:
    one, other = two
    prompts = [np.arange(20, 30, dtype=np.int32)]
    probe = Probe("float32", prompts, [np.full(9, -0.5, np.float32)])

    async def scenario(engine: SglangEngine) -> None:
        one.prompt_logprob = None  # as SGLang writes NaN
        engine.expect(probe)
        await engine.swap(model, SECOND, SwapMode.WAIT)
        for _ in range(3):
            assert (await engine.generate(ASK)).versions == (VersionSpan(1, 1, 3),)
        assert (len(one.bodies), len(other.bodies)) == (0, 3)
        assert engine.check is not None
        assert (engine.check.difference, engine.check.tolerance) == (0, 1e-3)
        other.prompt_logprob = -0.6
        engine.expect(probe)
        with pytest.raises(WeightsRejected, match="no server serves the weights of version 2 correctly"):
            await engine.swap(model, WeightsVersion(1, 2, "c" * 64), SwapMode.WAIT)

    with_engine(scenario, *two, push_model=model)
