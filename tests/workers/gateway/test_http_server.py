"""The gateway over HTTP: tokens, statuses, streams, lost connections, rewards, sessions for harnesses from outside."""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import orjson
import pytest

from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.gateway import replies
from rollq.workers.gateway.harnesses.remote import outside_loop
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.gateway.sessions.outcomes import Outcome
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import make_session, run
from support.served_gateway import BODY, RIGHT, Served, listening, offer_of, with_served
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1", "//v1", "/v1/"])
@pytest.mark.parametrize("way", ["path", "bearer", "key", "path and another key"])
def test_a_token_is_taken_from_the_path_or_a_header(tokenizer: HfTokenizer, prefix: str, way: str) -> None:
    async def use(given: Served) -> None:
        path = f"/s/{given.token}{prefix}" if way.startswith("path") else prefix
        headers = {
            "bearer": {"Authorization": f"bearer {given.token}"},
            "key": {"x-api-key": given.token},
            "path and another key": {"Authorization": "Bearer sk-1234"},
        }.get(way, {})
        status, body, _ = await given.post(f"{path}/chat/completions", **headers)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello")

    with_served(Model(tokenizer, ["Hello"]), use)


def test_nothing_is_reached_without_a_token(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        for path in ("/v1/chat/completions", "/s/wrong/v1/chat/completions", "/v1/messages", "/reward", "/v1/models"):
            status, body, _ = await given.post(path)
            assert (status, body["error"]["message"]) == (400, "this session is over")
        status, body, _ = await given.post("/s/wrong/v1/messages", **{"x-api-key": given.token})
        assert status == 400  # a token that is over is not replaced by another
        async with given.http.head(given.gateway.url + "/") as answer:
            assert answer.status == 400
        async with given.http.head(given.base) as answer:
            assert answer.status == 200

    with_served(Model(tokenizer, []), use)


def test_the_tokens_of_two_sessions_are_refused(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        with given.gateway.serving(make_session(Model(tokenizer, []))) as other:
            status, _, _ = await given.post(f"/s/{given.token}/chat/completions", Authorization=f"Bearer {other}")
            assert status == 401

    with_served(Model(tokenizer, []), use)


def test_models_and_token_counts_are_those_of_the_session(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        async with given.http.get(given.base + "/v1/models") as models:
            listed = await models.json()
        assert [entry["id"] for entry in listed["data"]] == ["rollq"]
        body = {**BODY, "max_tokens": 5}
        status, counted, _ = await given.post(f"/s/{given.token}/v1/messages/count_tokens", body)
        assert (status, counted) == (200, {"input_tokens": len("user: Hi\nassistant: ") + 1})
        status, answer, _ = await given.post(f"/s/{given.token}/v1/messages", body)
        assert answer["usage"]["input_tokens"] == counted["input_tokens"]

    with_served(Model(tokenizer, ["Hey"]), use)


def test_bodies_that_are_no_requests_get_one_clear_error(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        path = f"/s/{given.token}/v1/chat/completions"
        for body, words in [(b"{", "is not JSON"), (b"[1]", "not a JSON object"), (b"{}", "messages")]:
            status, answer, _ = await given.post(path, body)
            assert status == 400
            assert words in answer["error"]["message"]
        status, answer, _ = await given.post(path, b" " * 20_000)
        assert (status, answer["error"]["message"]) == (
            400,
            "the request is larger than max_body_mb of [worker.gateway]",
        )
        for wrong in ("/v1/embeddings", "/etc/passwd", "/v1/../../x", "/v1/chat/completions/count_tokens"):
            status, _, _ = await given.post(f"/s/{given.token}{wrong}")
            assert status == 400

    with_served(Model(tokenizer, []), use, max_body_mb=0.01)


@pytest.mark.parametrize("protocol", ["chat/completions", "messages", "responses"])
def test_too_many_messages_are_refused_before_they_are_read(tokenizer: HfTokenizer, protocol: str) -> None:
    async def use(given: Served) -> None:
        several = [None] * 10_001  # no messages, which a protocol would say
        status, answer, _ = await given.post(
            f"/s/{given.token}/v1/{protocol}", {"model": "rollq", "messages": several, "input": several}
        )
        assert (status, answer["error"]["message"]) == (400, "the request has 10001 messages, more than 10000")

    with_served(Model(tokenizer, []), use)


def test_a_stream_has_comments_until_the_answer_is_there(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "KEEPALIVE_S", 0.05)
    go = asyncio.Event()
    model = Model(tokenizer, ["Hello"])

    async def generate(request: Request) -> Completion:
        await go.wait()
        return await model.generate(request)

    async def use(given: Served) -> None:
        given.session.answering.rollout = replace(given.session.answering.rollout, generate=generate)
        async with given.http.post(given.base + "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            for _ in range(2):
                assert await answer.content.readuntil(b"\n\n") == b": keepalive\n\n"
            go.set()
            rest = await answer.content.read()
        assert b'"content":"Hello"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")

    with_served(model, use)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_gives_up_and_asks_again_gets_the_answer_that_was_being_made(
    tokenizer: HfTokenizer, streams: bool
) -> None:
    """As SDKs do at a timeout: they close the connection and send the request again."""
    asked: list[Request] = []
    go = asyncio.Event()
    model = Model(tokenizer, ["Hello", "again"])

    async def generate(request: Request) -> Completion:
        asked.append(request)
        await go.wait()
        return await model.generate(request)

    async def use(given: Served) -> None:
        given.session.answering.rollout = replace(given.session.answering.rollout, generate=generate)
        body = orjson.dumps({**BODY, "stream": streams})
        host, port = given.gateway.url.removeprefix("http://").split(":")
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST /s/{given.token}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            while not asked:
                await asyncio.sleep(0.01)
            writer.close()
            await writer.wait_closed()
        go.set()
        status, answer, _ = await given.post(f"/s/{given.token}/v1/chat/completions")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello")
        assert len(asked) == 1

    with_served(model, use)


@pytest.mark.parametrize("streams", [True, False])
def test_a_session_that_stops_refuses_those_who_wait_for_an_answer(tokenizer: HfTokenizer, streams: bool) -> None:
    asked = asyncio.Event()

    async def generate(_request: Request) -> Completion:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def use(given: Served) -> None:
        given.session.answering.rollout = replace(given.session.answering.rollout, generate=generate)
        path = f"/s/{given.token}/v1/chat/completions"
        waiting = asyncio.create_task(given.post(path, {**BODY, "stream": streams}))
        await asked.wait()
        await given.session.stop()
        status, body, _ = await waiting
        assert (status, body["error"]["code"]) == (400, "session_over")

    with_served(Model(tokenizer, []), use)


def test_a_client_that_leaves_while_it_sends_its_request_is_no_error(
    tokenizer: HfTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(given: Served) -> None:
        host, _, port = given.gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /s/{given.token}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)

    with_served(Model(tokenizer, []), use)
    assert caplog.messages == []


def test_a_request_that_cannot_be_read_is_logged_without_its_token_and_once(
    tokenizer: HfTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(given: Served) -> None:
        host, _, port = given.gateway.url.removeprefix("http://").rpartition(":")
        for ending in (b" HTTP/9.9x\r\n\r\n", b" HTTP/1.1\r\nHost: a\r\nHost : b\x00\r\n\r\n", b"\r\n\r\n"):
            for _ in range(5):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"POST /s/{given.token}/v1/models".encode() + ending)
                assert b" 400 " in await reader.readline()
                writer.close()
        assert (await given.post(f"/s/{given.token}/v1/chat/completions"))[0] == 200

    with caplog.at_level(logging.INFO):
        with_served(Model(tokenizer, ["It is 42"]), use)
    shown = [record for record in caplog.records if "could not be read" in record.getMessage()]
    assert len(shown) <= 1
    assert "/s/" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_reward_may_come_again_and_not_change(tokenizer: HfTokenizer) -> None:
    async def use(given: Served) -> None:
        path = f"/s/{given.token}/reward"
        wrong: Any
        for wrong in (
            {},
            {"reward": "1"},
            {"reward": True},
            {"reward": 1, "parts": [1]},
            {"reward": 1, "parts": {"a": None}},
            {"reward": None, "parts": {"a": 1}},
            b'{"reward": 1%s}' % (b"0" * 400),
            {"reward": None, "turns": []},
        ):
            status, answer, _ = await given.post(path, wrong, **RIGHT)
            assert (status, answer["error"]["message"][:10]) == (400, "a reward i")
        for _ in range(2):
            assert (await given.post(path, {"reward": 0.5}, **RIGHT))[0] == 200
        assert (await given.post(path, {"reward": 0.75}, **RIGHT))[0] == 409
        assert given.session.outcome.reward == 0.5
        status, answer, _ = await given.post(f"/s/{given.token}/v1/chat/completions")
        assert (status, answer["error"]["message"]) == (400, "this session is over")

    with_served(Model(tokenizer, []), use)


def test_an_address_that_is_taken_is_one_clear_error() -> None:
    async def work() -> None:
        async with listening() as (gateway, _):
            taken = gateway.url.removeprefix("http://")
            with pytest.raises(ConfigError, match=r"\[worker.gateway\] bind = .*in use"):
                await Server(Gateway(GatewaySettings(bind=taken))).start()

    run(work)


@pytest.mark.parametrize("reward", [1.0, None])  # None: the task's judge finds it
def test_a_harness_from_outside_takes_a_session_with_the_operators_key(
    reward: float | None, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "the operator's")

    async def work() -> None:
        async with listening() as (gateway, http):
            given = Served(gateway, make_session(Model(tokenizer, [])), "", http)
            key = {"Authorization": "Bearer the operator's"}
            status, _, headers = await given.post("/sessions", {}, **key)
            assert (status, headers["Retry-After"]) == (429, "2")
            loop = outside_loop(gateway, tool_parser="")
            prompt = Prompt("Say hello", answer="42", metadata={"level": 3}, row=7)
            made = replace(rollout(Model(tokenizer, ["Hello"]), prompt), task="math", index=2)
            making = asyncio.ensure_future(loop.run(made))
            while (taken := await given.post("/sessions", {}, **key))[0] != 200:
                await asyncio.sleep(0.01)
            offered = taken[1]
            base = f"{gateway.url}/s/{offered['token']}"
            assert offered == {
                "prompt": "Say hello", "task": "math", "row": 7, "sample": 2, "metadata": {"level": 3},
                "evaluation": False, "max_tokens": 1000, "deadline_s": 600.0, "token": offered["token"],
                "reward_token": offered["reward_token"], "session_url": base, "openai_base_url": f"{base}/v1",
            }  # fmt: skip
            for wrong in ({}, {"Authorization": "Bearer x"}):
                assert (await given.post("/sessions", {}, **wrong))[0] == 401
            base = offered["session_url"].removeprefix(gateway.url)
            assert (await given.post(f"{base}/v1/chat/completions"))[0] == 200
            right = {"Authorization": f"Bearer {offered['reward_token']}"}
            assert (await given.post(f"{base}/reward", {"reward": reward}))[0] == 401
            assert (await given.post(f"{base}/reward", {"reward": reward}, **right))[0] == 200
            sample = await asyncio.wait_for(making, PATIENCE_S)
            assert (sample.reward, sample.text, sample.finish_reason) == (reward, "Hello", FinishReason.STOP)
            assert sample.extra["refused_outcomes"] == 1

    run(work)


def test_without_a_key_of_the_operator_no_session_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(Exception, match=KEY_VARIABLE):
        Gateway(GatewaySettings()).taker("")


def test_a_prompt_of_token_ids_is_not_offered(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")
    gateway = Gateway(GatewaySettings())
    loop = outside_loop(gateway, tool_parser="")
    prompt = Prompt("", ids=(5, 6))
    with pytest.raises(ValueError, match="the prompt has token ids, which agents over the gateway cannot read"):
        run(lambda: loop.run(rollout(Model(tokenizer, []), prompt)))


def test_two_that_ask_at_once_get_two_sessions_and_none_that_is_over(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")

    async def work() -> None:
        async with listening() as (gateway, http):
            given = Served(gateway, make_session(Model(tokenizer, [])), "", http)
            closed, one, two = (make_session(Model(tokenizer, [])) for _ in range(3))
            stopped = replace(closed.answering.rollout, is_stopped=lambda: True)
            over = Session(stopped, make_format("hermes"), SessionLimits())
            closed.close(Outcome())
            with ExitStack() as stack:
                for session in (over, closed, one, two):
                    token = stack.enter_context(gateway.serving(session))
                    stack.enter_context(gateway.offers.offering(offer_of(session, token)))
                asked = [given.post("/sessions", {}, Authorization="Bearer key") for _ in range(3)]
                answers = await asyncio.gather(*asked)
            assert sorted(status for status, _, _ in answers) == [200, 200, 429]
            assert len({body["token"] for status, body, _ in answers if status == 200}) == 2

    run(work)


@pytest.mark.parametrize("key", [None, ""])
def test_a_worker_without_a_key_of_the_operator_does_not_start(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"agent loop 'outside' needs {KEY_VARIABLE}"):
        make_loop("outside", {"tool_parser": ""})


def test_a_buffer_that_is_away_is_not_taken_for_a_client_that_is_gone(tokenizer: HfTokenizer) -> None:
    async def away(_sample: Sample) -> bool:
        raise ServerUnavailable("no server answers")

    async def use(given: Served) -> None:
        rollout = given.session.answering.rollout
        given.session.answering.rollout = replace(rollout, record=away)
        status, body, _ = await given.post(f"/s/{given.token}/v1/chat/completions")
        assert (status, body["error"]["code"]) == (400, "session_over")
        assert isinstance(given.session.answering.failure, ServerUnavailable)

    with_served(Model(tokenizer, ["Hello"]), use)
