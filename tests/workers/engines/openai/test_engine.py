"""The engine behind HTTP, against a real server on loopback that refuses, hangs, drops and lies."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.openai.completions_api import check_logprobs
from rollq.workers.engines.openai.engine import API_KEY
from rollq.workers.engines.openai.servers import RequestFailed
from rollq.workers.engines.protocol import Completion, Engine, EngineDead, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.registry import make_engine
from rollq.workers.http import server_pool
from rollq.workers.http.retries import RetryPolicy, backoff_s, is_transient, parse_retry_after
from rollq.workers.run import make_tokenizer
from rollq.workers.settings import WorkerSettings
from support.openai_server import ANSWER, CompletionsServer
from support.pauses import set_pauses
from support.waiting import PATIENCE_S

NO_WEIGHTS = Path("no-weights")
RETRIES = 3
ASK = Request(np.array([40, 50], np.int32), Sampling(max_tokens=10, temperature=0.5, top_p=0.9, stop=("\n",), seed=7))

Scenario = Callable[[Engine], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.001, longest_s=0.002)


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with CompletionsServer() as server:
        yield server


def with_engine(server: CompletionsServer, scenario: Scenario, **options: Any) -> None:
    """Run `scenario` over a started engine and close it."""

    async def run() -> None:
        engine = make_engine("openai", {"urls": [server.url], "retries": RETRIES, **options})
        await engine.start()
        try:
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def ask(server: CompletionsServer, *plan: str, request: Request = ASK, **options: Any) -> Completion:
    """The completion of one request that meets `plan`."""
    server.plan.extend(plan)
    answers: list[Completion] = []

    async def scenario(engine: Engine) -> None:
        answers.append(await engine.generate(request))

    with_engine(server, scenario, **options)
    return answers[0]


async def acquire(semaphore: threading.Semaphore, times: int = 1) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(semaphore.acquire, timeout=PATIENCE_S)


def test_sb06_token_ids_go_in_and_token_ids_logprobs_and_versions_come_out(server: CompletionsServer) -> None:
    completion = ask(server)
    assert completion.ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.ids.tolist() == ANSWER
    assert completion.logprobs.tolist() == [-0.5] * 3
    assert completion.versions == (VersionSpan(0, 0, 3),)
    assert completion.finish_reason is FinishReason.STOP
    [body] = server.bodies
    assert body == {
        "model": "tiny", "prompt": [40, 50], "max_tokens": 10, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ["\n"],
        "seed": 7, "n": 1, "logprobs": 1, "return_token_ids": True, "cache_salt": "0.0",
        "stream": True, "priority": 0,
    }  # fmt: skip


def test_rare_sampling_parameters_are_sent_where_they_are_set(server: CompletionsServer) -> None:
    rare: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"40": -3.0},
        "bad_words": ("no",),
        "ignore_eos": True,
        "stop_token_ids": (7, 8),
    }
    for guide in ({"guided_regex": "a+"}, {"guided_json": {"type": "object"}}):
        ask(server, request=replace(ASK, sampling=replace(ASK.sampling, min_tokens=100, **rare, **guide)))
    sent = {**rare, "bad_words": ["no"], "stop_token_ids": [7, 8], "min_tokens": 10}
    first, second = server.bodies
    assert first == {**first, **sent, "structured_outputs": {"regex": "a+"}}
    assert second == {**first, "structured_outputs": {"json": {"type": "object"}}}


def test_sb06_a_prefix_is_part_of_the_prompt_and_the_context_limits_the_answer(server: CompletionsServer) -> None:
    prefixed = Request(ASK.prompt_ids, Sampling(max_tokens=100), prefix_ids=np.array([60], np.int32))
    ask(server, request=prefixed)
    assert server.bodies[0]["prompt"] == [40, 50, 60]
    assert server.bodies[0]["max_tokens"] == 61
    with pytest.raises(ValueError, match="context of 64"):
        ask(server, request=Request(np.zeros(64, np.int32), Sampling(max_tokens=1)))


@pytest.mark.parametrize(
    "failure", ["429", "500", "502", "503", "408", "drop", "garbage", "break", "no reason", "error 500", "error ?"]
)
def test_sb06_what_may_pass_is_tried_again(server: CompletionsServer, failure: str) -> None:
    assert ask(server, failure, failure, "ok").ids.tolist() == ANSWER
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


@pytest.mark.parametrize("failure", ["503", "drop", "garbage"])
def test_tokens_are_reported_after_a_try_that_gave_none(
    server: CompletionsServer, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setattr("rollq.workers.engines.openai.engine.REPORT_TOKENS", 1)
    said: list[Completion] = []
    assert ask(server, failure, request=replace(ASK, report=said.append)).ids.tolist() == ANSWER
    assert [len(report.ids) for report in said] == [1, 2]


def test_sb06_a_server_that_hangs_is_asked_again_after_the_timeout(server: CompletionsServer) -> None:
    assert ask(server, "hang", "ok", request_timeout_s=2).ids.tolist() == ANSWER
    assert len(server.bodies) == 2


def test_sb06_a_refusal_fails_the_sample_at_once_and_keeps_the_servers_words(server: CompletionsServer) -> None:
    with pytest.raises(ValueError, match=r'refuses the request: HTTP 400: \{"error": "said 400"\}'):
        ask(server, "400")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(("word", "problem"), [("no ids", "TypeError"), ("no logprobs", "3,. logprobs, or invalid")])
def test_sb06_an_answer_without_what_training_needs_is_refused(
    server: CompletionsServer, word: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=f"{server.url}.*{problem}"):
        ask(server, word)


def test_sb06_a_request_that_never_succeeds_fails_alone_while_the_server_answers_others(
    server: CompletionsServer,
) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.extend(["500"] * 4)
        with pytest.raises(RequestFailed, match=r'failed 4 times; last error: HTTP 500: \{"error": "said 500"\}'):
            await engine.generate(ASK)
        assert (await engine.generate(ASK)).ids.tolist() == ANSWER

    with_engine(server, scenario)


def test_sb06_a_server_that_answers_nobody_is_dead(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.extend(["503"] * 4)
        server.probe_plan.append("500")
        with pytest.raises(EngineDead, match=r"HTTP 503.*the simplest request failed too: HTTP 500"):
            await engine.generate(ASK)

    with_engine(server, scenario)


def test_sb06_a_server_that_is_gone_is_dead() -> None:
    with CompletionsServer() as server:

        async def scenario(engine: Engine) -> None:
            await asyncio.to_thread(server.stop)
            with pytest.raises(EngineDead, match="the simplest request failed too"):
                await engine.generate(ASK)

        with_engine(server, scenario)


def test_sb06_the_pause_is_the_one_that_the_server_asks_for(
    server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.retry_after = "17"
    asked: list[tuple[int, float | None]] = []

    def record(policy: RetryPolicy, failures: int, retry_after_s: float | None, jitter: float) -> float:
        assert 0 <= jitter < 1
        asked.append((failures, retry_after_s))
        return 0.0

    monkeypatch.setattr(server_pool, "backoff_s", record)
    ask(server, "429", "500", "ok")
    assert asked == [(1, 17.0), (2, None)]


def test_sb06_cancelling_a_request_frees_it_at_the_server(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.extend(["hang", "ok"])
        doomed = asyncio.create_task(engine.generate(ASK))
        await acquire(server.hanging)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await acquire(server.freed)
        assert (await engine.generate(ASK)).ids.tolist() == ANSWER
        # a swap that waits for running requests would hang on one that is not freed
        await engine.swap(NO_WEIGHTS, WeightsVersion(1, 0, "a"), SwapMode.WAIT)

    with_engine(server, scenario)


def test_sb06_cancelling_ends_a_pause_between_tries(server: CompletionsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=60, longest_s=60)

    async def scenario(engine: Engine) -> None:
        server.plan.extend(["500"])
        waiting = asyncio.create_task(engine.generate(ASK))
        while not server.bodies:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with_engine(server, scenario)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("mode", "ids", "reason", "version"),
    [
        (SwapMode.KEEP, ANSWER, FinishReason.STOP, 1),
        (SwapMode.ABORT, [], FinishReason.ABORT, None),
    ],
)
def test_sb06_a_request_carries_the_version_at_its_start_or_is_aborted(
    server: CompletionsServer, mode: SwapMode, ids: Sequence[int], reason: FinishReason, version: int | None
) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.swap(NO_WEIGHTS, WeightsVersion(1, 1, "a"), SwapMode.WAIT)
        server.plan.append("hang")
        running = asyncio.create_task(engine.generate(ASK))
        await acquire(server.hanging)
        await engine.swap(NO_WEIGHTS, WeightsVersion(1, 2, "b"), mode)
        server.release()
        completion = await running
        assert completion.ids.tolist() == ids
        assert completion.finish_reason is reason
        assert completion.versions == (() if version is None else (VersionSpan(1, version, 3),))
        assert (await engine.generate(ASK)).versions == (VersionSpan(1, 2, 3),)
        assert [body["cache_salt"] for body in server.bodies] == ["1.1", "1.2"]

    with_engine(server, scenario, server_follows=True)


def test_sb06_a_swap_that_waits_holds_new_requests_until_the_running_ones_end(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.append("hang")
        running = asyncio.create_task(engine.generate(ASK))
        await acquire(server.hanging)
        swap = asyncio.create_task(engine.swap(NO_WEIGHTS, WeightsVersion(1, 1, "b"), SwapMode.WAIT))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(ASK))
        await asyncio.sleep(0)
        assert not swap.done()
        server.release()
        assert (await running).versions == (VersionSpan(0, 0, 3),)
        await swap
        assert (await late).versions == (VersionSpan(1, 1, 3),)

    with_engine(server, scenario, server_follows=True)


def test_sb06_newer_weights_are_refused_unless_the_server_follows_by_itself(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.swap(NO_WEIGHTS, WeightsVersion(3, 0, "a"), SwapMode.KEEP)
        with pytest.raises(WeightsError, match=r"not given the weights of version 1.*server_follows = true"):
            await engine.swap(NO_WEIGHTS, WeightsVersion(3, 1, "b"), SwapMode.KEEP)
        assert engine.version == WeightsVersion(3, 0, "a")
        assert (await engine.generate(ASK)).versions == (VersionSpan(3, 0, 3),)

    with_engine(server, scenario)


def test_sb06_a_closed_engine_is_dead_for_running_and_new_requests(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.append("hang")
        running = asyncio.create_task(engine.generate(ASK))
        await acquire(server.hanging)
        await engine.close()
        with pytest.raises(EngineDead):
            await running
        with pytest.raises(EngineDead):
            await engine.generate(ASK)
        with pytest.raises(EngineDead):
            await engine.swap(NO_WEIGHTS, WeightsVersion(1, 0, "b"), SwapMode.WAIT)

    with_engine(server, scenario)


def test_an_abort_keeps_the_tokens_that_have_come(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan.append("stall")
        running = asyncio.create_task(engine.generate(ASK))
        await acquire(server.hanging)
        await asyncio.sleep(0.05)  # both events have been read
        await engine.swap(NO_WEIGHTS, WeightsVersion(1, 0, ""), SwapMode.ABORT)
        completion = await running
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.ids.tolist() == ANSWER[:2]
        assert completion.logprobs.tolist() == [-0.5] * 2
        assert completion.versions == (VersionSpan(0, 0, 2),)
        server.release()

    with_engine(server, scenario)


def test_sb06_a_refusal_in_the_middle_of_an_answer_is_one_too(server: CompletionsServer) -> None:
    with pytest.raises(ValueError, match=r'refuses the request: HTTP 400: .*"message":"told"'):
        ask(server, "error 400")
    assert len(server.bodies) == 1


def test_an_answer_that_repeats_a_long_prompt_is_read(server: CompletionsServer) -> None:
    assert ask(server, "long").ids.tolist() == ANSWER


@pytest.mark.parametrize("taken", [True, False])
def test_priorities_are_sent_to_servers_that_take_them(server: CompletionsServer, taken: bool) -> None:
    server.priorities = taken
    ask(server, request=replace(ASK, priority=-3))
    assert server.bodies[0].get("priority") == (-3 if taken else None)


def test_sb06_an_interrupted_answer_of_the_server_is_an_aborted_one(server: CompletionsServer) -> None:
    completion = ask(server, "abort")
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.ids.tolist() == ANSWER


def test_sb06_equal_logits_do_not_make_a_server_suspect() -> None:
    versions = (VersionSpan(0, 0, 3),)
    ids = np.array([7, 8, 9], np.int32)
    tied = np.log(np.array([1, 1 / 2, 1 / 258])).astype(np.float32)
    check_logprobs(Completion(ids, tied, versions, FinishReason.LENGTH))
    with pytest.raises(ValueError, match="returned no tokens"):
        check_logprobs(Completion(ids[:0], tied[:0], (), FinishReason.STOP))


async def nothing(engine: Engine) -> None:
    return None


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("raw", "logprobs of -0.500, -0.500, -0.500 for tokens .*--logprobs-mode processed_logprobs"),
        ("no ids", "use a server with return_token_ids"),
        ("404", 'HTTP 404: {"error": "said 404"}'),
    ],
)
def test_sb06_a_server_that_cannot_serve_training_is_refused_at_the_start(
    server: CompletionsServer, word: str, problem: str
) -> None:
    server.probe_plan.append(word)
    with pytest.raises(ConfigError, match=problem):
        with_engine(server, nothing)


def test_sb06_a_server_that_still_starts_is_waited_for(server: CompletionsServer) -> None:
    server.probe_plan.extend(["503"] * 10)  # more than `retries`
    with_engine(server, nothing)
    assert not server.probe_plan


def test_sb06_a_server_that_never_starts_is_dead() -> None:
    with CompletionsServer() as server:
        pass
    with pytest.raises(EngineDead, match=r"not ready within start_timeout_s = 0\.2 s"):
        with_engine(server, nothing, start_timeout_s=0.2)


@pytest.mark.parametrize(
    ("models", "options", "problem"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, r"serves \['a', 'b'\]: set served_model"),
        ({"data": [{"id": "a"}]}, {"served_model": "b"}, r"serves \['a'\], not served_model = 'b'"),
        ({"data": []}, {}, r"serves \[\]"),
        ({"error": "?"}, {}, "list of models cannot be read"),
    ],
)
def test_sb06_the_model_is_the_one_that_is_wanted_or_the_only_one(
    server: CompletionsServer, models: Any, options: dict[str, str], problem: str
) -> None:
    server.models = models
    with pytest.raises(ConfigError, match=problem):
        with_engine(server, nothing, **options)
    server.models = {"data": [{"id": "a"}, {"id": "b"}]}
    ask(server, served_model="b")
    assert server.bodies[-1]["model"] == "b"


def test_sb06_the_key_of_the_server_comes_from_the_environment(
    server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(server, nothing)
    assert "Authorization" not in server.headers
    monkeypatch.setenv(API_KEY, "secret")
    with_engine(server, nothing)
    assert server.headers["Authorization"] == "Bearer secret"


def test_sb06_the_tokenizer_of_a_served_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="needs the folder of the served model's tokenizer"):
        make_tokenizer(WorkerSettings(engine="openai", options={"urls": ["http://127.0.0.1:1/v1"]}))


# the policy


@pytest.mark.parametrize(
    ("status", "transient"),
    [(400, False), (401, False), (404, False), (422, False), (408, True), (429, True), (500, True), (503, True)],
)
def test_sb06_transient_statuses(status: int, transient: bool) -> None:
    assert is_transient(status) is transient


@pytest.mark.parametrize(
    ("failures", "retry_after_s", "jitter", "pause_s"),
    [
        (1, None, 0.0, 0.5),
        (2, None, 0.0, 1.0),
        (4, None, 0.0, 4.0),
        (4, None, 0.5, 3.0),
        (6, None, 0.0, 10.0),  # 16 s without the limit
        (1, 2.0, 0.0, 2.0),
        (1, 0.1, 0.0, 0.5),
        (6, 60.0, 0.9, 60.0),  # the server's wish is above the limit
        (7, None, 0.0, None),
        (7, 1.0, 0.0, None),
    ],
)
def test_sb06_pauses_double_up_to_a_limit_and_end(
    failures: int, retry_after_s: float | None, jitter: float, pause_s: float | None
) -> None:
    assert backoff_s(RetryPolicy(6, 0.5, 10.0), failures, retry_after_s, jitter) == pause_s


def test_sb06_pauses_of_endless_tries_stay_finite() -> None:
    assert backoff_s(RetryPolicy(5000, 0.5, 10.0), 5000, None, 0.0) == 10.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Sat, 21 Nov 2026 10:00:30 GMT", 30.0),
        ("Sat, 21 Nov 2026 09:00:00 GMT", 0.0),
        ("Sat, 21 Nov 2026 10:00:30", None),
    ],
)
def test_sb06_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, datetime(2026, 11, 21, 10, tzinfo=UTC)) == seconds


def test_xp13_a_swap_that_aborts_waits_for_requests_that_must_finish(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan += ["hang", "hang"]
        running = asyncio.create_task(engine.generate(replace(ASK, must_finish=True)))
        other = asyncio.create_task(engine.generate(replace(ASK)))
        await acquire(server.hanging, 2)
        swap = asyncio.create_task(engine.swap(NO_WEIGHTS, WeightsVersion(1, 1, "b"), SwapMode.ABORT))
        assert (await other).finish_reason is FinishReason.ABORT
        assert not swap.done()
        server.release()
        assert (await running).versions == (VersionSpan(0, 0, 3),)
        await swap
        assert engine.version.version == 1

    with_engine(server, scenario, server_follows=True)


def test_a_request_that_is_aborted_ends_at_once_and_a_sleeping_engine_sends_none(server: CompletionsServer) -> None:
    async def scenario(engine: Engine) -> None:
        server.plan += ["hang", "hang"]
        named = replace(ASK)
        ended, running = (asyncio.create_task(engine.generate(request)) for request in (named, ASK))
        await acquire(server.hanging, 2)
        await engine.abort([named])
        assert (await ended).finish_reason is FinishReason.ABORT
        assert not running.done()
        await engine.sleep()
        assert (await running).finish_reason is FinishReason.ABORT
        waiting = asyncio.create_task(engine.generate(ASK))
        await asyncio.sleep(0)
        await engine.swap(NO_WEIGHTS, WeightsVersion(1, 1, "b"), SwapMode.WAIT)
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).versions == (VersionSpan(1, 1, 3),)

    with_engine(server, scenario, server_follows=True)
