"""Auxiliary models: logprobs of every token from servers beside the engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollq.buffer.errors import ConfigError
from rollq.buffer.schema import Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.settings import TaskSettings
from rollq.workers.pools import Pool, PoolSettings, score
from rollq.workers.processes import JudgeProcesses
from rollq.workers.recipes import make_recipes
from rollq.workers.settings import WorkerSettings

QUICK: dict[str, Any] = {"served_model": "teacher", "retries": 2, "retry_first_s": 0.01}


def segment(prompt: list[int], response: list[int]) -> Segment:
    tokens = len(response)
    return Segment(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        np.full(tokens, -0.5, np.float32),
        (VersionSpan(1, 0, tokens),),
        arrays={"kept": np.arange(tokens)},
    )


SAMPLE = Sample(segments=(segment([5, 6], [7, 8, 9]), segment([5], [7])), status=SampleStatus.COMPLETED)


def told(ids: list[int]) -> list[Any]:
    """What vLLM says of a prompt: nothing of the first token, then each token's logprob, here of its id."""
    return [None, *({str(one): {"logprob": -one / 10, "rank": 1}} for one in ids[1:])]


def with_server(
    answer: Callable[[dict[str, Any]], Any], scene: Callable[[str], Awaitable[None]], asked: list[dict[str, Any]]
) -> None:
    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        given = answer(body)
        return given if isinstance(given, web.Response) else web.json_response(given)

    async def run() -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_every_segment_gets_the_logprobs_of_its_response() -> None:
    asked: list[dict[str, Any]] = []

    async def scene(url: str) -> None:
        pool = Pool("teacher", PoolSettings(urls=(url,), **QUICK))
        scored = await score(SAMPLE, {"teacher": pool}, ["teacher"])
        await pool.close()
        for before, after, expected in zip(SAMPLE.segments, scored.segments, ([-0.7, -0.8, -0.9], [-0.7]), strict=True):
            array = after.arrays["teacher_logprobs"]
            assert isinstance(array, np.ndarray)
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, expected, rtol=1e-6)
            assert after.arrays["kept"] is before.arrays["kept"]

    with_server(lambda body: {"choices": [{"prompt_logprobs": told(body["prompt"])}]}, scene, asked)
    assert [body["prompt"] for body in asked] == [[5, 6, 7, 8, 9], [5, 7]]
    assert all(body["model"] == "teacher" and body["temperature"] == 1.0 for body in asked)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"prompt_logprobs": [None]}]}, "1 entries for 5 tokens"),
        ({"choices": [{}]}, "no prompt_logprobs"),
        ({"choices": [{"prompt_logprobs": [None, {}, {}, {}, {}]}]}, "KeyError"),
        ({"choices": [{"prompt_logprobs": told([5, 6, 1, 2, 3])}]}, "KeyError: '7'"),
        (web.Response(status=400, text="too long"), "HTTP 400: too long"),
        (web.Response(status=500, text="sorry"), "failed 3 times, last with HTTP 500: sorry"),
    ],
)
def test_what_a_server_cannot_tell_fails_the_sample_with_the_reason(answer: Any, message: str) -> None:
    def fresh(body: dict[str, Any]) -> Any:
        return web.Response(status=answer.status, body=answer.body) if isinstance(answer, web.Response) else answer

    async def scene(url: str) -> None:
        pool = Pool("teacher", PoolSettings(urls=(url,), **QUICK))
        with pytest.raises(ValueError, match=message) as raised:
            await score(SAMPLE, {"teacher": pool}, ["teacher"])
        assert "pool 'teacher'" in str(raised.value)
        await pool.close()

    with_server(fresh, scene, [])


def test_requests_go_to_the_server_with_the_least_to_do() -> None:
    counts: list[list[dict[str, Any]]] = [[], []]

    def answer(body: dict[str, Any]) -> Any:
        return {"choices": [{"prompt_logprobs": told(body["prompt"])}]}

    async def outer(first: str) -> None:
        await asyncio.to_thread(with_server, answer, lambda url: nested(first, url), counts[1])

    async def nested(first: str, second: str) -> None:
        pool = Pool("teacher", PoolSettings(urls=(first, second), **QUICK))
        await asyncio.gather(*(score(SAMPLE, {"teacher": pool}, ["teacher"]) for _ in range(10)))
        await pool.close()

    with_server(answer, outer, counts[0])
    assert [len(asked) for asked in counts] == [10, 10]


def test_a_scorer_without_its_pool_is_refused_at_the_start() -> None:
    tasks = {"math": TaskSettings(batch_groups=1, prompts=Path("none"), scorers=("teacher",))}
    with pytest.raises(ConfigError, match=r"there is no table \[worker.pools.teacher\]"):
        make_recipes(tasks, WorkerSettings(), 0, JudgeProcesses(1))
