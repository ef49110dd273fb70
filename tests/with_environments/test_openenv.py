"""The kind `openenv` against the real server: many sessions on few places, a server that is killed, frozen sockets."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollq.buffer.common.ports import free_port
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Sample, SampleStatus
from rollq.environments.kinds import Level
from rollq.environments.openenv import session
from rollq.environments.openenv.kind import OpenEnv, OpenEnvSource
from rollq.environments.openenv.session import Session
from rollq.environments.trials import prompt_of
from rollq.workers.agents.loops import AgentLoop
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.environment_pythons import OPENENV
from support.environment_rows import first_rows
from support.frozen_relay import FrozenRelay
from support.played_openenv import EXCHANGES
from support.waiting import PATIENCE_S, wait_until

GUESSES = [str(number) for number in range(10)]


class RealServer:
    """The server of `openenv_server.py`, in a process."""

    def __init__(self, kind: str, places: int, port: int | None = None) -> None:
        self.port = port or free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        script = Path(__file__).with_name("openenv_server.py")
        self._process = subprocess.Popen([OPENENV, script, str(self.port), kind, str(places)])

    def wait(self) -> "RealServer":
        """Wait until it answers."""
        wait_until(self._answers, otherwise=lambda: self._process.poll())
        return self

    def kill(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        async def ask() -> bool:
            try:
                async with aiohttp.ClientSession() as client, client.get(f"{self.url}/health") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def guess() -> Iterator[RealServer]:
    server = RealServer("guess", 64)
    yield server.wait()
    server.kill()


@pytest.fixture(scope="module")
def shop() -> Iterator[RealServer]:
    server = RealServer("shop", 4)
    yield server.wait()
    server.kill()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Guesser(Model):
    """Guesses all numbers in turn, and waits before its second guess until `go` is set."""

    go: asyncio.Event | None = None
    reached: asyncio.Semaphore | None = None

    async def generate(self, request: Request) -> Completion:
        if len(self.requests) == 1 and self.go is not None and self.reached is not None:
            self.reached.release()
            await self.go.wait()
        return await super().generate(request)


def source(url: str, **options: Any) -> OpenEnvSource:
    return OpenEnv().open(url, options, "train")


def loop_of(made: OpenEnvSource, **more: Any) -> AgentLoop:
    settings = made.settings()
    return make_loop(settings["agent_loop"], settings["agent_options"] | {"max_turns": 12} | more)


def check_places(url: str, places: int) -> None:
    """All places of a server are free."""

    async def take_all() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                sessions = [await Session.connect(url) for _ in range(places)]
                try:
                    await asyncio.gather(*(each.ask("reset", {"seed": 1}) for each in sessions))
                except Exception:  # noqa: BLE001 - the server has not noticed all that have gone
                    await asyncio.sleep(0.5)
                else:
                    return
                finally:
                    await asyncio.gather(*(each.close() for each in sessions))

    asyncio.run(take_all())


def was_won(sample: Any) -> bool:
    return (
        isinstance(sample, Sample) and sample.status is SampleStatus.COMPLETED and sample.extra["turn_rewards"][-1] == 1
    )


def failed_without_reward(made: Any) -> bool:
    return isinstance(made, SampleFailed) and made.kind is FailureKind.ENVIRONMENT


def test_the_played_server_speaks_as_the_real_one(guess: RealServer, shop: RealServer) -> None:
    async def talk(server: RealServer, *messages: dict[str, Any]) -> list[Any]:
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{server.url}/ws") as socket:
            answers = []
            for message in messages:
                await socket.send_json(message)
                answers.append(json.loads((await socket.receive()).data))
            return answers

    def calling(name: str, **arguments: Any) -> dict[str, Any]:
        return {"type": "step", "data": {"type": "call_tool", "tool_name": name, "arguments": arguments}}

    steps = [{"type": "step", "data": {"guess": number}} for number in ("4", "x", 11)]
    reset = {"type": "reset", "data": {"seed": 3, "index": 1}}
    said = asyncio.run(talk(guess, reset, *steps))
    assert said == [EXCHANGES[name] for name in ("reset", "step", "invalid", "broken")]
    calls = [calling("buy", item="apples"), calling("buy", item="pears"), calling("sell")]
    listing = {"type": "step", "data": {"type": "list_tools"}}
    said = asyncio.run(talk(shop, listing, {"type": "reset", "data": {}}, *calls))
    assert said == [EXCHANGES[name] for name in ("list_tools", "reset_shop", "call", "failed_call", "unknown_tool")]


def test_the_check_finds_nothing_wrong(guess: RealServer, shop: RealServer) -> None:
    made = [
        source(guess.url, prompt="{task.name}: {hint}"),
        source(shop.url, tools=True, prompt="{metadata.wanted}"),
    ]
    for each in made:
        rows = first_rows(each, 50)
        assert {finding.level for finding in each.check(rows[:40])} == {Level.NOTE}
        assert rows == first_rows(each, 50)
        assert len(rows) == (40 if each.url == guess.url else 50)


def test_tools_are_bought_with(shop: RealServer, tokenizer: HfTokenizer) -> None:
    made = source(shop.url, tools=True, prompt="Buy {metadata.wanted}.")
    [row] = first_rows(made, 1)
    model = Model(tokenizer, [call("buy", item="pears"), call("buy", item="apples", count=2)])
    sample = asyncio.run(loop_of(made, tool_parser="hermes").run(rollout(model, prompt_of(row))))
    assert sample.extra["turn_rewards"] == [0.0, 1.0]
    assert sample.extra["messages"][1]["content"] == "error: Error calling tool 'buy': there are no pears"


def test_256_sessions_share_64_places(guess: RealServer, tokenizer: HfTokenizer) -> None:
    made = source(guess.url)
    rows, loop = list(made.rows()), loop_of(made)

    async def play() -> list[Any]:
        prompts = (prompt_of(rows[index % len(rows)]) for index in range(256))
        games = (loop.run(rollout(Guesser(tokenizer, GUESSES), prompt)) for prompt in prompts)
        return await asyncio.gather(*games, return_exceptions=True)

    started = time.perf_counter()
    samples = asyncio.run(play())
    print(f"256 sessions took {time.perf_counter() - started:.1f} s")
    assert [each for each in samples if not was_won(each)] == []
    check_places(guess.url, 64)


def test_a_killed_server_fails_only_samples_with_an_episode(tokenizer: HfTokenizer) -> None:
    server = RealServer("guess", 8).wait()
    made = source(server.url)
    rows, loop = list(made.rows()), loop_of(made)

    async def play() -> list[Any]:
        go, reached = asyncio.Event(), asyncio.Semaphore(0)
        models = [Guesser(tokenizer, GUESSES) for _ in range(24)]
        for model in models:
            model.go, model.reached = go, reached
        hard = [row for row in rows if row["env"]["index"] % 2]
        games = [
            asyncio.create_task(loop.run(rollout(model, prompt_of(hard[index % len(hard)]))))
            for index, model in enumerate(models)
        ]
        for _ in range(4):
            await reached.acquire()
        await asyncio.to_thread(server.kill)
        go.set()
        back = await asyncio.to_thread(lambda: RealServer("guess", 8, server.port).wait())
        answers = time.perf_counter()
        before = sum(game.done() for game in games)
        while sum(game.done() for game in games) == before:
            await asyncio.sleep(0.01)
        print(f"the next sample ended {time.perf_counter() - answers:.1f} s after the server's return")
        result = await asyncio.gather(*games, return_exceptions=True)
        back.kill()
        return result

    samples = asyncio.run(asyncio.wait_for(play(), PATIENCE_S))
    lost = [each for each in samples if failed_without_reward(each)]
    assert 4 <= len(lost) <= 8
    assert all("the socket was lost" in str(error) for error in lost)
    assert sum(map(was_won, samples)) == 24 - len(lost)


def test_frozen_sockets_fail_their_samples_and_keep_no_place(
    guess: RealServer, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 2.0)
    rows = first_rows(source(guess.url), 16)

    async def play() -> Sequence[Any]:
        go, reached = asyncio.Event(), asyncio.Semaphore(0)
        async with FrozenRelay(guess.port).serving() as relay:
            loop = loop_of(source(f"http://127.0.0.1:{relay.port}"))
            models = [Guesser(tokenizer, GUESSES[::-1]) for _ in rows]
            for model in models:
                model.go, model.reached = go, reached
            games = [
                asyncio.create_task(loop.run(rollout(model, prompt_of(row))))
                for model, row in zip(models, rows, strict=True)
            ]
            while reached._value + sum(game.done() for game in games) < len(games):
                await asyncio.sleep(0.01)
            relay.freeze()
            go.set()
            result = await asyncio.gather(*games, return_exceptions=True)
            await asyncio.to_thread(check_places, guess.url, 64)  # with the relay's sockets still open
            return result

    samples = asyncio.run(asyncio.wait_for(play(), PATIENCE_S))
    lost = [each for each in samples if failed_without_reward(each)]
    assert lost
    assert len(lost) + sum(map(was_won, samples)) == len(rows)
