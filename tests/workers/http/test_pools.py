"""Auxiliary models: logprobs of every token from servers beside the engine."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Segment, VersionSpan
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.http.client import TransientError
from rollq.workers.http.pools import ModelPool, PoolSettings, score
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from rollq.workers.settings import WorkerSettings
from support.pauses import set_pauses
from support.serving import serving

QUICK: dict[str, Any] = {"served_model": "teacher", "retries": 2}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.01, longest_s=10)


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=1000, longest_s=1000)


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


@asynccontextmanager
async def served(answer: Callable[[dict[str, Any]], Any], asked: list[dict[str, Any]]) -> AsyncIterator[str]:
    """The URL of a server that gives what `answer`, sync or async, makes of a request's body."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        key = {"key": request.headers["Authorization"]} if "Authorization" in request.headers else {}
        asked.append(body | key)
        given = answer(body)
        given = await given if inspect.isawaitable(given) else given
        return given if isinstance(given, web.Response) else web.json_response(given)

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    application.router.add_post("/v1/chat/completions", complete)
    async with serving(application) as url:
        yield f"{url}/v1"


def with_server(
    answer: Callable[[dict[str, Any]], Any], scene: Callable[[str], Awaitable[None]], asked: list[dict[str, Any]]
) -> None:
    async def run() -> None:
        async with served(answer, asked) as url:
            await scene(url)

    asyncio.run(run())


def test_every_segment_gets_the_logprobs_of_its_response() -> None:
    asked: list[dict[str, Any]] = []

    async def scene(url: str) -> None:
        pool = ModelPool("teacher", PoolSettings(urls=(url,), **QUICK))
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


def likely(ids: list[int], *more: float) -> list[Any]:
    """What vLLM says with the likeliest tokens: tokens 100, 101, ... with the logprobs `more`."""
    others = {str(100 + rank): {"logprob": logprob, "rank": rank + 1} for rank, logprob in enumerate(more)}
    return [None, *({**one, **others} for one in told(ids)[1:])]


def test_with_top_k_every_segment_gets_the_likeliest_tokens_as_well() -> None:
    asked: list[dict[str, Any]] = []

    async def scene(url: str) -> None:
        pool = ModelPool("teacher", PoolSettings(urls=(url,), **QUICK, top_k=2))
        first, second = (await score(SAMPLE, {"teacher": pool}, ["teacher"])).segments
        await pool.close()
        ids, logprobs = (np.asarray(first.arrays[f"teacher_top_{name}"]) for name in ("ids", "logprobs"))
        assert ids.dtype == np.int32
        assert logprobs.dtype == np.float32
        assert ids.tolist() == [[7, 101], [101, 100], [101, 100]]
        np.testing.assert_allclose(logprobs, [[-0.7, -0.75], [-0.75, -0.78], [-0.75, -0.78]], rtol=1e-6)
        np.testing.assert_allclose(np.asarray(first.arrays["teacher_logprobs"]), [-0.7, -0.8, -0.9], rtol=1e-6)
        assert np.asarray(second.arrays["teacher_top_ids"]).tolist() == [[7, 101]]

    with_server(lambda body: {"choices": [{"prompt_logprobs": likely(body["prompt"], -0.78, -0.75)}]}, scene, asked)
    assert [body["prompt_logprobs"] for body in asked] == [2, 2]


def test_fewer_likely_tokens_than_top_k_fail_the_sample() -> None:
    async def scene(url: str) -> None:
        pool = ModelPool("teacher", PoolSettings(urls=(url,), **QUICK, top_k=2))
        with pytest.raises(ValueError, match="1 prompt_logprobs at a position where top_k asks for 2"):
            await score(SAMPLE, {"teacher": pool}, ["teacher"])
        await pool.close()

    with_server(lambda body: {"choices": [{"prompt_logprobs": likely(body["prompt"])}]}, scene, [])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"prompt_logprobs": [None]}]}, "1 entries for 5 tokens"),
        ({"choices": [{}]}, "no prompt_logprobs"),
        ({"choices": [{"prompt_logprobs": [None, {}, {}, {}, {}]}]}, "KeyError"),
        ({"choices": [{"prompt_logprobs": told([5, 6, 1, 2, 3])}]}, "KeyError: '7'"),
        (web.Response(status=400, text="too long"), "HTTP 400: too long"),
        (web.Response(status=500, text="sorry"), "failed 3 times; last error: HTTP 500: sorry"),
    ],
)
def test_what_a_server_cannot_tell_fails_the_sample_with_the_reason(answer: Any, message: str) -> None:
    def fresh(body: dict[str, Any]) -> Any:
        return web.Response(status=answer.status, body=answer.body) if isinstance(answer, web.Response) else answer

    async def scene(url: str) -> None:
        pool = ModelPool("teacher", PoolSettings(urls=(url,), **QUICK))
        with pytest.raises(ValueError, match=message) as raised:
            await score(SAMPLE, {"teacher": pool}, ["teacher"])
        assert "pool 'teacher'" in str(raised.value)
        await pool.close()

    with_server(fresh, scene, [])


def tell(body: dict[str, Any]) -> Any:
    return {"choices": [{"prompt_logprobs": told(body["prompt"])}]}


def fail(body: dict[str, Any]) -> Any:
    return web.Response(status=503, text="busy")


Scene = Callable[[ModelPool, list[list[dict[str, Any]]]], Awaitable[None]]


def counts_of_two(answers: Sequence[Callable[..., Any]], scene: Scene, **settings: Any) -> list[int]:
    """How many requests two servers got in a scene with their pool."""
    asked: list[list[dict[str, Any]]] = [[], []]

    async def run() -> None:
        async with served(answers[0], asked[0]) as first, served(answers[1], asked[1]) as second:
            pool = ModelPool("teacher", PoolSettings(urls=(first, second + "/"), **{**QUICK, **settings}))
            await scene(pool, asked)
            await pool.close()

    asyncio.run(run())
    return [len(each) for each in asked]


async def ask(pool: ModelPool) -> None:
    await pool.score(np.array([5, 6], np.int32), np.array([7], np.int32))


def test_requests_go_to_the_server_with_the_least_to_do() -> None:
    all_are_here = asyncio.Barrier(10)

    async def tell_all_at_once(body: dict[str, Any]) -> Any:
        await all_are_here.wait()
        return tell(body)

    async def scene(pool: ModelPool, asked: Any) -> None:
        await asyncio.gather(*(ask(pool) for _ in range(10)))

    assert counts_of_two([tell_all_at_once] * 2, scene) == [5, 5]


@pytest.mark.usefixtures("long_pauses")
def test_a_server_that_fails_is_left_out_and_what_it_failed_is_asked_of_another_at_once() -> None:
    async def scene(pool: ModelPool, asked: Any) -> None:
        for _ in range(10):
            await ask(pool)

    assert counts_of_two([fail, tell], scene, retries=1) == [1, 10]


@pytest.mark.usefixtures("long_pauses")
def test_requests_that_fail_together_leave_a_server_out_as_long_as_one_does() -> None:
    all_are_here = asyncio.Barrier(10)

    async def fail_all_at_once(body: dict[str, Any]) -> Any:
        await all_are_here.wait()
        return fail(body)

    async def scene(pool: ModelPool, asked: Any) -> None:
        await asyncio.gather(*(ask(pool) for _ in range(10)), return_exceptions=True)
        assert all(server.failures == 1 for server in pool._caller.servers)

    counts_of_two([fail_all_at_once] * 2, scene, retries=0)


def test_a_server_that_failed_is_asked_again_later() -> None:
    failures = [fail]

    def recover(body: dict[str, Any]) -> Any:
        return failures.pop()(body) if failures else tell(body)

    async def scene(pool: ModelPool, asked: list[list[dict[str, Any]]]) -> None:
        while len(asked[0]) < 2:
            await ask(pool)

    counts_of_two([recover, tell], scene)


@pytest.mark.usefixtures("long_pauses")
def test_all_requests_leave_a_silent_server_with_the_first_that_it_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is given one request at a time, so that the others wait for a place at it."""
    ended = asyncio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        await ended.wait()

    async def scene(pool: ModelPool, asked: list[list[dict[str, Any]]]) -> None:
        with caplog.at_level(logging.DEBUG, "rollq.workers.http.server_pool"):
            await asyncio.gather(*(ask(pool) for _ in range(16)))
        ended.set()

    assert counts_of_two([hang, tell], scene, concurrent=1, request_timeout_s=1) == [1, 16]
    failures = [record.message for record in caplog.records if record.message.startswith("try ")]
    assert sum("it does not answer other requests" in failure for failure in failures) == len(failures) - 1


def test_a_server_that_failed_gets_one_request_at_a_time_until_it_answers() -> None:
    answers = asyncio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        await answers.wait()
        return tell(body)

    async def scene(pool: ModelPool, asked: list[list[dict[str, Any]]]) -> None:
        pool._caller.servers[0].failures = 1  # and it has been left out for long enough
        running = [asyncio.create_task(ask(pool)) for _ in range(16)]
        await asyncio.gather(*running[1:])
        assert [len(each) for each in asked] == [1, 15]
        answers.set()
        await running[0]

    counts_of_two([hang, tell], scene)


def test_a_pool_whose_servers_all_fail_is_tried_as_often_as_it_may() -> None:
    async def scene(pool: ModelPool, asked: Any) -> None:
        with pytest.raises(TransientError, match="failed 3 times; last error: HTTP 503: busy"):
            await ask(pool)

    assert sum(counts_of_two([fail, fail], scene, retries=2)) == 3


async def grading_judge(prompt: Prompt, sample: Sample, pools: Mapping[str, ModelPool]) -> float:
    messages = [{"role": "user", "content": f"Grade {sample.text!r}."}]
    return float(await pools["grader"].chat(messages, max_tokens=4, temperature=0.0))


def blocking_judge(prompt: Prompt, sample: Sample, pools: Mapping[str, ModelPool]) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"choices": [{"message": {"content": " 0.75"}}]}, 0.75),
        ({"choices": [{"message": {"content": None}}]}, "ValueError: no text in"),
        ({"choices": []}, "ValueError: no message in"),
        ({"choices": [{"message": {"content": "very good"}}]}, "ValueError: could not convert"),
        (web.Response(status=404, text="no such model"), "HTTP 404: no such model"),
    ],
)
def test_a_judge_of_ones_own_asks_a_pool(answer: Any, expected: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLQ_POOL_GRADER_API_KEY", "planted")
    asked: list[dict[str, Any]] = []
    task = WorkerTask(batch_groups=1, judge=f"{__name__}.grading_judge")

    async def scene(url: str) -> None:
        settings = WorkerSettings(pools={"grader": PoolSettings(urls=(url,), **QUICK)})
        recipe = make_recipes({"essay": task}, settings, 0, JudgePool(1))["essay"]
        verdict = await recipe.judge.judge(Prompt("?"), Sample((), status=SampleStatus.COMPLETED, text="so"))
        await recipe.pools["grader"].close()
        if isinstance(expected, float):
            assert verdict == Verdict(expected)
        else:
            assert verdict.error is not None
            assert expected in verdict.error

    with_server(lambda _: answer, scene, asked)
    assert asked == [
        {
            "model": "teacher",
            "messages": [{"role": "user", "content": "Grade 'so'."}],
            "max_tokens": 4,
            "temperature": 0.0,
            "key": "Bearer planted",
        }
    ]


def test_a_judge_that_takes_pools_needs_some() -> None:
    with pytest.raises(ConfigError, match=r"takes pools, but none is set: add \[worker.pools.<name>\]"):
        make_judge(f"{__name__}.grading_judge", {}, JudgeContext(30, JudgePool(1)))


def test_the_name_of_a_pool_can_be_a_part_of_a_variables() -> None:
    with pytest.raises(ValidationError, match="tea cher"):
        WorkerSettings.model_validate({"pools": {"tea cher": {"urls": ["http://127.0.0.1:1/v1"]}}})


def test_a_judge_that_takes_pools_must_be_async() -> None:
    with pytest.raises(ConfigError, match="is not async; expected async def"):
        make_judge(f"{__name__}.blocking_judge", {}, JudgeContext(30, JudgePool(1)))


def test_a_pool_that_fails_is_logged_once_for_each_kind_of_failure(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(body: dict[str, Any]) -> Any:
        return web.Response(status=400, text="too long") if len(body["prompt"]) > 2 else fail(body)

    async def scene(url: str) -> None:
        pools = {"teacher": ModelPool("teacher", PoolSettings(urls=(url,), **QUICK))}
        for part in SAMPLE.segments * 3:
            with pytest.raises(ValueError, match="pool 'teacher'"):
                await score(replace(SAMPLE, segments=(part,)), pools, ["teacher"])
        await pools["teacher"].close()

    with caplog.at_level(logging.WARNING):
        with_server(refuse, scene, [])
    assert [record.message for record in caplog.records] == [
        "pool teacher failed; its samples keep the error, and more of this type are not logged"
    ] * 2
    assert "too long" in caplog.text
    assert "HTTP 503" in caplog.text


def test_a_scorer_without_its_pool_is_refused_at_the_start() -> None:
    tasks = {"math": WorkerTask(batch_groups=1, scorers=("teacher",))}
    with pytest.raises(ConfigError, match=r"there is no table \[worker.pools.teacher\]"):
        make_recipes(tasks, WorkerSettings(), 0, JudgePool(1))
