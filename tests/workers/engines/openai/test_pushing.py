"""Weights that the engine behind HTTP loads into its servers, and servers that do not take them."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import EngineDead, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.registry import make_engine
from support.openai_server import ANSWER, CompletionsServer
from support.pauses import set_pauses
from support.waiting import PATIENCE_S, wait_until

ASK = Request(np.array([40, 50], np.int32), Sampling(max_tokens=10, seed=7))
FIRST, SECOND = WeightsVersion(1, 0, "a" * 64), WeightsVersion(1, 1, "b" * 64)
LOADED = [
    "weight_info",
    "update_weight_version loading",
    "pause",
    "rollq_load",
    "resume",
    f"update_weight_version 1.0.{16 * 'a'}",
]
CHECKED = ["ok", "ok"]  # before and after requests have ended
RETRIES = 3


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.01, longest_s=0.02)


def write_model(folder: Path, rows: int = 2, dtype: type = np.float32) -> Path:
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": np.zeros((rows, 2), dtype), "norm": np.zeros(2, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def two() -> Iterator[tuple[CompletionsServer, CompletionsServer]]:
    with CompletionsServer() as one, CompletionsServer() as other:
        one.weight_routes = other.weight_routes = True
        yield one, other


def with_engine(
    model: Path,
    served: tuple[CompletionsServer, ...],
    scenario: Callable[[OpenAIEngine], Awaitable[None]],
) -> None:
    """Run `scenario` over an engine that has pushed the first weights."""

    async def run() -> None:
        urls = tuple(server.url for server in served)
        engine = OpenAIEngine(OpenAISettings(urls=urls, push_model=model, retries=RETRIES))
        await engine.start()
        try:
            await until_all_are_in(engine)
            await engine.swap(model, FIRST, SwapMode.WAIT)
            await until_all_are_in(engine)
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def calls(server: CompletionsServer) -> list[str]:
    """What has been done to the server's weights since the last look."""
    seen, server.weight_calls = server.weight_calls, []
    return seen


def outs(engine: OpenAIEngine) -> list[bool]:
    return [not server.serving for server in engine._servers.servers]


async def until_all_are_in(engine: OpenAIEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(outs(engine)):
            await asyncio.sleep(0.005)


async def hold(semaphore: Any) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=PATIENCE_S)


def test_weights_are_loaded_while_the_server_is_paused_and_named_when_they_are_whole(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)

    async def scenario(engine: OpenAIEngine) -> None:
        assert calls(two[0]) == ["resume", "rollq_check", "rollq_check", *LOADED]
        assert calls(two[1]) == ["resume", *LOADED]
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 0, 3),)
        assert await engine.swap(Path("model"), SECOND, SwapMode.WAIT) > 0
        assert engine.version == SECOND
        assert "rollq_load" in calls(two[0])
        assert two[0].loaded == [str(model), {"model.embed_tokens.weight": "lm_head.weight"}]

    with_engine(model, two, scenario)


def test_weights_that_a_server_has_already_are_not_loaded_again(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def nothing(engine: OpenAIEngine) -> None:
        return None

    for _ in range(2):
        with_engine(model, two[:1], nothing)
    assert calls(two[0]).count("rollq_load") == 1


def test_a_swap_that_keeps_asks_on_from_the_tokens_that_have_come(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    server = two[0]

    async def scenario(engine: OpenAIEngine) -> None:
        server.plan.append("stall")
        running = asyncio.create_task(engine.generate(replace(ASK, prefix_ids=np.array([60], np.int32))))
        await hold(server.hanging)
        while sum(len(call.tokens.ids) for call in engine._gate.calls) < 2:
            await asyncio.sleep(0.005)
        await engine.swap(model, SECOND, SwapMode.KEEP)
        completion = await running
        assert completion.ids.tolist() == [*ANSWER[:2], *ANSWER]
        assert completion.logprobs.tolist() == [-0.5] * 5
        assert completion.versions == (VersionSpan(1, 0, 2), VersionSpan(1, 1, 3))
        assert completion.finish_reason is FinishReason.STOP
        first, second = server.bodies
        assert second["prompt"] == [40, 50, 60, *ANSWER[:2]]
        assert (first["max_tokens"], second["max_tokens"]) == (10, 8)
        assert first["seed"] == 7 != second["seed"]
        server.release()

    with_engine(model, two[:1], scenario)


def test_a_swap_after_a_broken_answer_reports_nothing_that_would_not_continue_it(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.workers.engines.openai.engine.REPORT_TOKENS", 1)
    server, reported = two[0], []

    async def scenario(engine: OpenAIEngine) -> None:
        server.plan += ["break", "stall"]
        running = asyncio.create_task(
            engine.generate(replace(ASK, report=lambda so_far: reported.append(len(so_far.ids))))
        )
        await hold(server.hanging)
        while sum(len(call.tokens.ids) for call in engine._gate.calls) < 2:
            await asyncio.sleep(0.005)
        await engine.swap(model, SECOND, SwapMode.KEEP)
        assert len((await running).ids) == 5
        assert reported == [1, 2], "both are of the answer that broke off"
        server.release()

    with_engine(model, two[:1], scenario)


def test_an_abort_while_weights_are_loaded_ends_a_request_with_what_it_had(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    server = two[0]

    async def scenario(engine: OpenAIEngine) -> None:
        server.plan.append("stall")
        request = replace(ASK)
        running = asyncio.create_task(engine.generate(request))
        await hold(server.hanging)
        while sum(len(call.tokens.ids) for call in engine._gate.calls) < 2:
            await asyncio.sleep(0.005)
        server.weight_plan.extend([*CHECKED, *["503"] * 5])
        swap = asyncio.create_task(engine.swap(model, SECOND, SwapMode.KEEP))
        while server.weight_version != "loading":
            await asyncio.sleep(0.001)
        await engine.abort([request])
        completion = await running
        assert (completion.ids.tolist(), completion.finish_reason) == (ANSWER[:2], FinishReason.ABORT)
        await swap
        assert len(server.bodies) == 1
        server.release()

    with_engine(model, two[:1], scenario)


def test_an_abort_at_the_moment_of_a_swap_ends_a_request_that_the_swap_cuts_off(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        two[0].plan.append("stall")
        request = replace(ASK)
        running = asyncio.create_task(engine.generate(request))
        await hold(two[0].hanging)
        async with engine._gate.swap(), engine._gate.closed(SwapMode.KEEP, interrupt=True):
            await engine.abort([request])
        assert (await running).finish_reason is FinishReason.ABORT
        two[0].release()

    with_engine(model, two[:1], scenario)


def test_a_server_that_fails_to_load_gets_no_requests_until_it_has(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    one, other = two

    async def scenario(engine: OpenAIEngine) -> None:
        one.weight_plan.extend([*CHECKED, *["500"] * 10_000])
        await engine.swap(model, SECOND, SwapMode.WAIT)
        assert outs(engine) == [True, False]
        for _ in range(3):
            assert (await engine.generate(replace(ASK))).versions == (VersionSpan(1, 1, 3),)
        assert (len(one.bodies), len(other.bodies)) == (0, 3)
        one.weight_plan.clear()
        await until_all_are_in(engine)
        assert one.weight_version == other.weight_version == f"1.1.{16 * 'b'}"
        await engine.generate(replace(ASK))
        assert len(one.bodies) == 1

    with_engine(model, two, scenario)


def test_a_server_that_takes_the_weights_when_the_only_other_is_gone_serves_alone(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    """Its weights have a name: nobody need be asked whether it answers alike."""
    one, other = two

    async def scenario(engine: OpenAIEngine) -> None:
        one.weight_plan.extend([*CHECKED, *["500"] * 10_000])
        await engine.swap(model, SECOND, SwapMode.WAIT)
        await asyncio.to_thread(other.stop)
        one.weight_plan.clear()
        async with asyncio.timeout(PATIENCE_S):
            while outs(engine)[0]:
                await asyncio.sleep(0.005)
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 1, 3),)

    with_engine(model, two, scenario)


def test_a_server_that_was_started_again_is_given_the_weights_before_a_request(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        calls(two[0])
        await engine.generate(ASK)
        assert calls(two[0]) == ["weight_info"]
        two[0].weight_version = "default"
        await asyncio.gather(*(engine.generate(replace(ASK)) for _ in range(5)))
        assert calls(two[0]) == LOADED
        two[0].plan.append("drop")
        await engine.generate(ASK)
        assert calls(two[0]) == ["weight_info"] * 2
        two[0].plan += ["hang", "drop"]
        other = asyncio.create_task(engine.generate(replace(ASK)))
        await hold(two[0].hanging)
        calls(two[0])
        await engine.generate(ASK)
        assert calls(two[0]) == ["weight_info"]
        two[0].release()
        await other

    with_engine(model, two[:1], scenario)


async def endless_swap(engine: OpenAIEngine, server: CompletionsServer, model: Path) -> "asyncio.Task[float]":
    """A swap under way, to weights that the server never takes."""
    server.weight_plan.extend([*CHECKED, *["500"] * 10_000])
    swap = asyncio.create_task(engine.swap(model, SECOND, SwapMode.WAIT))
    while server.weight_version != "loading":
        await asyncio.sleep(0.001)
    return swap


def test_an_engine_whose_servers_do_not_take_the_weights_is_dead(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        engine._settings = engine._settings.model_copy(update={"start_timeout_s": 2})
        swap = await endless_swap(engine, two[0], model)
        waiting = asyncio.create_task(engine.generate(ASK))
        with pytest.raises(EngineDead, match=r"no server took the weights of version 1 within 2 s"):
            await swap
        with pytest.raises(EngineDead):
            await waiting
        assert engine.version == FIRST

    with_engine(model, two[:1], scenario)


def test_an_engine_whose_swap_is_cancelled_half_way_is_dead(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        swap = await endless_swap(engine, two[0], model)
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        with pytest.raises(EngineDead, match="cancelled half-way"):
            await engine.generate(ASK)

    with_engine(model, two[:1], scenario)


def test_weights_that_no_server_can_read_leave_the_old_ones_serving(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        for server in two:
            calls(server)
            server.weight_plan.append("500")
        with pytest.raises(WeightsError, match=r"said 500.*said 500.*every server sees under the same path"):
            await engine.swap(model, SECOND, SwapMode.ABORT)
        assert calls(two[0]) == calls(two[1]) == []
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 0, 3),)

    with_engine(model, two, scenario)


def test_weights_that_go_while_requests_end_leave_the_old_ones_serving(
    model: Path, two: tuple[CompletionsServer, CompletionsServer]
) -> None:
    async def scenario(engine: OpenAIEngine) -> None:
        calls(two[0])
        two[0].weight_plan.extend(["ok", "500"])
        with pytest.raises(WeightsError, match="said 500"):
            await engine.swap(model, SECOND, SwapMode.KEEP)
        assert calls(two[0]) == ["rollq_check"]
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 0, 3),)

    with_engine(model, two[:1], scenario)


def test_weights_of_another_model_and_adapters_are_refused(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], tmp_path: Path
) -> None:
    other, adapter = write_model(tmp_path / "other", rows=3), write_model(tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    refused = {
        other: "has shape", adapter: "LoRA adapter", tmp_path / "gone": "cannot read",
        write_model(tmp_path / "integers", dtype=np.int8): "has dtype I8, the model's is F32",
    }  # fmt: skip

    async def scenario(engine: OpenAIEngine) -> None:
        for folder, problem in refused.items():
            with pytest.raises(WeightsError, match=problem):
                await engine.swap(folder, SECOND, SwapMode.ABORT)
        assert engine.version == FIRST
        await engine.swap(write_model(tmp_path / "halves", dtype=np.float16), SECOND, SwapMode.ABORT)
        assert engine.version == SECOND

    with_engine(model, two[:1], scenario)


def test_a_head_that_is_the_embedding_is_loaded_under_its_own_name_and_may_be_left_out(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], tmp_path: Path
) -> None:
    headed = write_model(tmp_path / "headed")
    tensors = {"model.embed_tokens.weight": (2, 2), "norm": (2,), "lm_head.weight": (2, 2)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, headed / "model.safetensors")

    async def scenario(engine: OpenAIEngine) -> None:
        assert engine._model.copies == {"model.embed_tokens.weight": "lm_head.weight"}
        await engine.swap(headed, SECOND, SwapMode.WAIT)
        assert engine.version == SECOND

    with_engine(model, two[:1], scenario)


def test_what_cannot_push_is_told_at_the_start(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], tmp_path: Path
) -> None:
    async def nothing(engine: OpenAIEngine) -> None:
        return None

    two[0].weight_routes = False
    with pytest.raises(ConfigError, match=r"HTTP 404.*VLLM_SERVER_DEV_MODE=1"):
        with_engine(model, two[:1], nothing)
    with pytest.raises(ConfigError, match="cannot read weights"):
        with_engine(tmp_path / "gone", two[:1], nothing)
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json that can be read"):
        with_engine(model, two[:1], nothing)
    with pytest.raises(ConfigError, match="set one"):
        make_engine("openai", {"urls": [two[0].url], "push_model": model, "server_follows": True})


def test_all_requests_leave_a_frozen_server_with_the_first_that_it_does_not_answer(
    model: Path, two: tuple[CompletionsServer, CompletionsServer], caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for the name of its weights first; the others wait for that answer."""
    command = (sys.executable, "-m", "support.openai_server")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    async def scene(frozen: "subprocess.Popen[str]", url: str) -> None:
        urls = (url, two[0].url)
        engine = OpenAIEngine(OpenAISettings(urls=urls, push_model=model, retries=RETRIES, request_timeout_s=1))
        await engine.start()
        try:
            await until_all_are_in(engine)
            await engine.swap(model, FIRST, SwapMode.WAIT)
            await until_all_are_in(engine)
            frozen.send_signal(signal.SIGSTOP)  # it takes effect when the main thread wakes, and another one serves
            wait_until(lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED)
            with caplog.at_level(logging.DEBUG, "rollq.workers.http.server_pool"):
                answers = await asyncio.gather(*(engine.generate(replace(ASK)) for _ in range(16)))
            assert outs(engine) == [True, False]
            frozen.send_signal(signal.SIGCONT)
            await until_all_are_in(engine)
        finally:
            await engine.close()
        assert [len(answer.ids) for answer in answers] == [3] * 16

    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frozen:
        assert frozen.stdout is not None
        try:
            url = frozen.stdout.readline().strip()
            asyncio.run(scene(frozen, url))
        finally:
            frozen.kill()
    failures = [record.message for record in caplog.records if f" at {url} failed" in record.message]
    assert sum("no answer within 1 s" in failure for failure in failures) == 1
    assert sum("it does not answer other requests" in failure for failure in failures) == 7
