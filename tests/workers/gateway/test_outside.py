"""Sessions for programs elsewhere over HTTP: who gets which, how long they last, and how they end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from rollq.buffer.rewards.credit import TOKEN_REWARDS
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample
from rollq.workers.agents.loops import AgentLoop
from rollq.workers.gateway.harnesses.remote import outside_loop
from rollq.workers.gateway.offers import Offer
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import make_session, run
from support.served_gateway import BODY, RIGHT, Served, listening, with_served
from support.waiting import PATIENCE_S

KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")


@asynccontextmanager
async def asking() -> AsyncIterator[Served]:
    """A gateway without a session, and requests to it."""
    async with listening() as (gateway, http):
        yield Served(gateway, None, "", http)  # type: ignore[arg-type]  # nothing asks for its session


def offer(stack: ExitStack, gateway: Gateway, tokenizer: HfTokenizer, task: str, name: str) -> Offer:
    session = make_session(Model(tokenizer, []))
    made = Offer(task, {"name": name}, lambda: session.calls.is_over, session.close)
    stack.enter_context(gateway.offers.offering(made))
    return made


async def until_waiting(gateway: Gateway, calls: int) -> None:
    while len(gateway.offers._waiting) < calls:
        await asyncio.sleep(0.01)


async def taken(given: Served, **wanted: Any) -> dict[str, Any]:
    """The session that a program gets."""
    status, offered, _ = await given.post("/sessions", {"wait_s": 30, **wanted}, **KEY)
    assert status == 200
    return offered


def right(offered: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {offered['reward_token']}"}


def test_a_call_waits_for_a_session_of_its_tasks(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            with ExitStack() as stack:
                waiting = [asyncio.create_task(taken(given, tasks=[task])) for task in ("a", "b")]
                await until_waiting(given.gateway, 2)
                offer(stack, given.gateway, tokenizer, "b", "of b")
                offer(stack, given.gateway, tokenizer, "a", "of a")
                assert [answer["name"] for answer in await asyncio.gather(*waiting)] == ["of a", "of b"]

    run(work)


def test_the_call_that_waits_longest_comes_first(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            with ExitStack() as stack:
                waiting = []
                for number in range(3):
                    waiting.append(asyncio.create_task(taken(given)))
                    await until_waiting(given.gateway, number + 1)
                for number in range(3):
                    offer(stack, given.gateway, tokenizer, "a", str(number))
                assert [answer["name"] for answer in await asyncio.gather(*waiting)] == ["0", "1", "2"]

    run(work)


def test_tasks_take_turns_and_each_gives_its_oldest_session(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            with ExitStack() as stack:
                for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
                    offer(stack, given.gateway, tokenizer, name[0], name)
                names = [(await taken(given, tasks=["a", "b"]))["name"] for _ in range(5)]
                assert names == ["a1", "b1", "a2", "b2", "a3"]
                status, _, headers = await given.post("/sessions", {"tasks": ["a", "b"]}, **KEY)
                assert (status, headers["Retry-After"]) == (429, "2")
                assert (await taken(given))["name"] == "c1"

    run(work)


def test_a_waiting_call_whose_client_leaves_takes_no_session(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            async with aiohttp.ClientSession() as impatient:
                timeout = aiohttp.ClientTimeout(total=None, sock_read=0.2)
                with pytest.raises(asyncio.TimeoutError):
                    await impatient.post(
                        f"{given.gateway.url}/sessions", json={"wait_s": 30}, headers=KEY, timeout=timeout
                    )
            assert len(given.gateway.offers._waiting) == 1
            while not given.gateway.offers._waiting[0].is_lost():
                await asyncio.sleep(0.01)
            with ExitStack() as stack:
                made = offer(stack, given.gateway, tokenizer, "a", "kept")
                assert not made.taken.is_set()
                assert (await taken(given))["name"] == "kept"
                assert made.taken.is_set()

    run(work)


def test_a_session_whose_answer_cannot_be_sent_is_offered_again(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ConnectionResetError

    async def work() -> None:
        async with asking() as given:
            with ExitStack() as stack:
                made = offer(stack, given.gateway, tokenizer, "a", "kept")
                with monkeypatch.context() as patched:
                    patched.setattr(aiohttp.web.Response, "write_eof", lost)
                    with pytest.raises(aiohttp.ClientError):
                        await given.post("/sessions", {}, **KEY)
                assert not made.taken.is_set()
                assert (await taken(given))["name"] == "kept"

    run(work)


def test_waits_end_when_the_worker_stops(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            waiting = asyncio.create_task(given.post("/sessions", {"wait_s": 30}, **KEY))
            await until_waiting(given.gateway, 1)
            given.gateway.offers.end_waits()
            status, body, headers = await waiting
            assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "stopping", "2")
            assert (await given.post("/sessions", {"wait_s": 30}, **KEY))[0] == 429
            with ExitStack() as stack:
                offer(stack, given.gateway, tokenizer, "a", "late")  # of a group that still runs
                assert (await taken(given))["name"] == "late"

    run(work)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"tasks": []}, "tasks must be a list of names"),
        ({"tasks": "sums"}, "tasks must be a list of names"),
        ({"wait_s": 31}, "wait_s must be a number of seconds from 0 to 30"),
        ({"wait_s": True}, "wait_s must be a number"),
        ({"tasks": ["sum"]}, "this worker has none of these tasks: sum; its tasks for programs elsewhere: sums"),
    ],
)
def test_a_wrong_request_for_a_session_is_refused(wanted: dict[str, Any], words: str) -> None:
    async def work() -> None:
        async with asking() as given:
            given.gateway.tasks.add("sums")
            status, body, _ = await given.post("/sessions", wanted, **KEY)
            assert status == 400
            assert words in body["error"]["message"]

    run(work)


async def made_by(loop: AgentLoop, given: Served, model: Model) -> tuple[dict[str, Any], "asyncio.Task[Sample]"]:
    """A session of the loop that a program has taken, and the sample that it becomes."""
    making = asyncio.ensure_future(loop.run(rollout(model, Prompt("Say hello"))))
    return await taken(given), making


@pytest.mark.parametrize(("limit", "calls", "words"), [("starting_s", 0, "no call"), ("idle_s", 1, "no further call")])
def test_a_session_that_is_not_used_fails(limit: str, calls: int, words: str, tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            limits = {"starting_s": 1000.0, "idle_s": 1000.0, "session_timeout_s": 1000.0, limit: 0.5}
            loop = outside_loop(given.gateway, tool_parser="", **limits)
            offered, making = await made_by(loop, given, Model(tokenizer, ["Hello"]))
            for _ in range(calls):
                await given.post(f"/s/{offered['token']}/v1/chat/completions")
            sample = await asyncio.wait_for(making, PATIENCE_S)
            assert (sample.status.name, sample.reward) == ("FAILED", None)
            assert sample.error == f"the program made {words} for 0.5 s ({limit})"

    run(work)


def test_the_time_before_the_first_call_is_not_idle(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        async with asking() as given:
            loop = outside_loop(given.gateway, tool_parser="", idle_s=0.001)
            offered, making = await made_by(loop, given, Model(tokenizer, ["Hello"]))
            await asyncio.sleep(1)  # more than a look at the session
            assert not making.done()
            assert (await given.post(f"/s/{offered['token']}/v1/chat/completions"))[0] == 200
            sample = await asyncio.wait_for(making, PATIENCE_S)
            assert sample.error == "the program made no further call for 0.001 s (idle_s)"

    run(work)


def test_a_program_fails_its_sample_with_a_kind_and_a_reason(tokenizer: HfTokenizer) -> None:
    failure = {"kind": "sandbox", "reason": "no image"}

    async def work() -> None:
        async with asking() as given:
            loop = outside_loop(given.gateway, tool_parser="")
            offered, making = await made_by(loop, given, Model(tokenizer, ["Hello"]))
            path = f"/s/{offered['token']}/fail"
            assert (await given.post(f"/s/{offered['token']}/v1/chat/completions"))[0] == 200
            assert (await given.post(path, failure))[0] == 401
            for wrong in (
                {},
                {"kind": "bad", "reason": "x"},
                {"kind": "tool", "reason": ""},
                {"kind": [], "reason": 1},
            ):
                status, body, _ = await given.post(path, wrong, **right(offered))
                assert (status, body["error"]["message"][:9]) == (400, "a failure")
            assert (await given.post(path, failure, **right(offered)))[0] == 200
            sample = await asyncio.wait_for(making, PATIENCE_S)
            assert (sample.failure, sample.reward, sample.error) == (FailureKind.SANDBOX, None, "no image")
            assert sample.finish_reason is FinishReason.ERROR
            assert [call["number"] for call in sample.extra["calls"]] == [0]

    run(work)


def test_a_failure_may_come_again_and_not_become_a_reward(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        path, failure = f"/s/{given.token}", {"kind": "tool", "reason": "broke"}
        for _ in range(2):
            assert (await given.post(f"{path}/fail", failure, **RIGHT))[0] == 200
        assert (await given.post(f"{path}/reward", {"reward": 1}, **RIGHT))[0] == 409
        assert (await given.post(f"{path}/fail", {**failure, "kind": "program"}, **RIGHT))[0] == 409
        status, body, _ = await given.post(f"{path}/v1/chat/completions")
        assert (status, body["error"]["code"]) == (400, "session_over")

    with_served(Model(tokenizer, []), use)


async def calls_of(given: Served, texts: list[str]) -> None:
    """Make a call for each text, one conversation each."""
    for text in texts:
        body = {**BODY, "messages": [{"role": "user", "content": text}]}
        assert (await given.post(f"/s/{given.token}/v1/chat/completions", body))[0] == 200


def test_turns_become_rewards_of_tokens_in_the_order_recorded(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        await calls_of(given, ["a", "b", "c"])
        path = f"/s/{given.token}/reward"
        for turns in ([1, 2], [1, 2, "x"], [1, 2, 1e39], 3):
            assert (await given.post(path, {"turns": turns}, **RIGHT))[0] == 400
        extra = {"steps": 3, "won": [True]}
        status, body, _ = await given.post(path, {"turns": [0.5, -1, 2], "extra": extra}, **RIGHT)
        assert (status, body) == (200, {"reward": 1.5})
        await given.session.settle()
        sample = given.session.sample(extra={})
        assert (sample.reward, sample.extra["program"]) == (1.5, extra)
        rewards = [np.asarray(segment.arrays[TOKEN_REWARDS]) for segment in sample.segments]
        assert [part[-1] for part in rewards] == [0.5, -1, 2]
        assert [part.dtype for part in rewards] == [np.float32] * 3
        assert not np.concatenate([part[:-1] for part in rewards]).any()

    with_served(Model(tokenizer, ["One", "Two", "Three"]), use)


def test_turns_of_one_conversation_are_in_one_segment(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        question: dict[str, Any] = {"role": "user", "content": "Hi"}
        path = f"/s/{given.token}/v1/chat/completions"
        _, body, _ = await given.post(path, {**BODY, "messages": [question]})
        answer = body["choices"][0]["message"]
        await given.post(path, {**BODY, "messages": [question, answer, {"role": "user", "content": "Again"}]})
        reward = {"reward": 9, "turns": [1, 2]}
        assert (await given.post(f"/s/{given.token}/reward", reward, **RIGHT))[1] == {"reward": 9}
        await given.session.settle()
        (segment,) = given.session.sample(extra={}).segments
        rewards = np.asarray(segment.arrays[TOKEN_REWARDS])
        assert segment.loss_mask is not None
        first_end = int(np.flatnonzero(~segment.loss_mask)[0]) - 1
        assert [float(rewards[first_end]), float(rewards[-1]), int(np.count_nonzero(rewards))] == [1, 2, 2]

    with_served(Model(tokenizer, ["One", "Two"]), use)


@pytest.mark.parametrize("extra", [{"a": "x" * 16_001}, [], "x", {"a": [[]]}])
def test_extra_is_small_and_flat_enough(extra: Any, tokenizer: HfTokenizer) -> None:
    if extra == {"a": [[]]}:
        for _ in range(240):
            extra = {"a": extra}

    async def use(given: Served) -> None:
        status, body, _ = await given.post(f"/s/{given.token}/reward", {"reward": 1, "extra": extra}, **RIGHT)
        assert (status, body["error"]["message"][:5]) == (400, "extra")

    with_served(Model(tokenizer, []), use)


def test_the_token_of_a_session_has_no_right_to_its_reward(
    tokenizer: HfTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(given: Served) -> None:
        other = make_session(Model(tokenizer, []))
        with given.gateway.serving(other, reward_token="another's") as token:
            bearer = {"Authorization": f"Bearer {given.token}"}
            for path, headers in (
                (f"/s/{given.token}", {}),
                (f"/s/{given.token}", bearer),
                ("", bearer),
                ("", {"x-api-key": given.token}),
                (f"/s/{given.token}", {"Authorization": "Bearer sk-1234"}),
                (f"/s/{given.token}", {"Authorization": "Bearer another's"}),
                (f"/s/{given.token}", {**RIGHT, "x-api-key": "another's"}),
            ):
                for route in ("reward", "fail"):
                    body = {"reward": 1.0, "kind": "tool", "reason": "x"}
                    status, answer, _ = await given.post(f"{path}/{route}", body, **headers)
                    assert (status, answer["error"]["code"]) == (401, "invalid_token")
            assert (await given.post(f"/s/{token}/reward", {"reward": 1}, **RIGHT))[0] == 401
            assert not other.closed.is_set()
        assert not given.session.closed.is_set()
        assert given.session.refused_outcomes == 10
        assert (await given.post("/reward", {"reward": 1}, **RIGHT))[0] == 200  # the right alone names the session

    with_served(Model(tokenizer, []), use)
    (line,) = [line for line in caplog.messages if "reward" in line]
    assert line == "1 requests tried to set the reward of a session without its reward_token"
