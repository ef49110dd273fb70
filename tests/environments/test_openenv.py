"""The kind `openenv` against a server of ours that speaks the wire of the real one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.environments.episodes import ENV, OPENING, row_seed
from rollq.environments.kinds import Level
from rollq.environments.openenv import session
from rollq.environments.openenv.episode import Episode
from rollq.environments.openenv.kind import OpenEnv, OpenEnvSource
from rollq.environments.openenv.session import Session, SessionLost
from rollq.environments.trials import prompt_of
from rollq.workers.agents.loops import AgentLoop
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.environment_rows import first_rows
from support.played_openenv import PlayedOpenEnv
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def source(server: PlayedOpenEnv, split: str = "train", **options: Any) -> OpenEnvSource:
    return OpenEnv().open(server.url, options, split)


def loop_of(made: OpenEnvSource, **more: Any) -> AgentLoop:
    settings = made.settings()
    return make_loop(settings["agent_loop"], settings["agent_options"] | more)


def row(index: int, seed: int = 7) -> dict[str, Any]:
    opening = f"task {index}: guess a number from 0 to 9 ({seed})"
    return {"prompt": opening, ENV: {"split": "train", "index": index, "seed": seed, OPENING: opening}}


async def play(loop: AgentLoop, tokenizer: HfTokenizer, words: Sequence[str], prompt: Prompt) -> Sample:
    return await loop.run(rollout(Model(tokenizer, words), prompt))


def in_loop(server: PlayedOpenEnv, work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` returns, with the server in the same event loop. Nothing is left open."""

    async def run() -> Any:
        async with server.serving():
            result = await work()
            async with asyncio.timeout(PATIENCE_S):
                while server.sessions:
                    await asyncio.sleep(0.01)
            return result

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def failure(server: PlayedOpenEnv, work: Callable[[], Awaitable[Any]]) -> SampleFailed:
    with pytest.raises(SampleFailed) as raised:
        in_loop(server, work)
    assert raised.value.kind is FailureKind.ENVIRONMENT
    return raised.value


def test_rows_are_the_tasks_of_a_list() -> None:
    with PlayedOpenEnv().beside() as server:
        rows = first_rows(source(server, "test", prompt="{task.name}: {hint}"), 20)
        assert len(rows) == 20
        seed = row_seed(0, "test", 19)
        opening = f"task 19: guess a number from 0 to 9 ({seed})"
        assert rows[19] == {
            "prompt": f"test 19: {opening}",
            "env": {"split": "test", "index": 19, "seed": seed, "opening": opening},
        }
        assert rows == first_rows(source(server, "test", prompt="{task.name}: {hint}"), 20)
        with pytest.raises(ConfigError, match="no task in split 'dev'; the splits are train, test"):
            next(source(server, "dev").rows())


def test_rows_of_a_server_without_a_list_are_seeds() -> None:
    with PlayedOpenEnv(tasks=None).beside() as server:
        rows = first_rows(source(server, seed=5), 3)
    assert [each["env"]["seed"] for each in rows] == [row_seed(5, "train", index) for index in range(3)]
    assert all(each["prompt"] == each["env"]["opening"] for each in rows)


def test_rows_need_a_server() -> None:
    server = PlayedOpenEnv()
    with pytest.raises(ConfigError, match=f"no server answers at {server.url}: start it"):
        next(source(server).rows())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": -1}, "seed"),
        ({"wrong": 1}, "wrong"),
        ({"action": "{text}"}, "action is a table"),
        ({"action": {"guess": 1}}, "action has {text}"),
        ({"action": {"guess": "{number}"}}, "action has {text}"),
        ({"invalid": "0"}, "invalid"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"env_options.*{problem}"):
        OpenEnv().open("http://127.0.0.1:1", options, "train")


def test_the_name_is_a_url() -> None:
    with pytest.raises(ConfigError, match="write the URL of the server"):
        OpenEnv().open("127.0.0.1:8000", {}, "train")


def test_a_game_is_played_and_each_turn_earns_its_reward(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    loop = loop_of(source(server))
    sample = in_loop(server, lambda: play(loop, tokenizer, ["1", "x", "3"], prompt_of(row(3))))
    assert sample.status is SampleStatus.COMPLETED
    assert sample.extra["turn_rewards"] == [-0.25, 0.0, 1.0]
    assert sample.extra["environment_reward"] == 0.75
    assert sample.extra["invalid_actions"] == 1
    assert [each["content"] for each in sample.extra["messages"]] == [
        "1",
        "higher",
        "x",
        "error: guess: Input should be a valid integer, unable to parse string as an integer",
        "3",
    ]
    assert server.seen == [
        {"type": "reset", "data": {"split": "train", "index": 3, "seed": 7}},
        *({"type": "step", "data": {"guess": guess}} for guess in ("1", "x", "3")),
        {"type": "close"},
    ]


def test_an_invalid_action_may_end_with_nothing(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    loop = loop_of(source(server, invalid="end", action={"guess": "{answer}"}))
    words = ["I say <answer>1</answer>", "x"]
    sample = in_loop(server, lambda: play(loop, tokenizer, words, prompt_of(row(3))))
    assert (sample.extra["turn_rewards"], sample.extra["invalid_actions"]) == ([-0.25, 0.0], 1)


def test_a_turn_may_be_the_action_as_json(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    loop = loop_of(source(server, action="{json}", observation="The number is {hint}."))
    prompt = Prompt(
        "?", metadata={ENV: row(3)[ENV] | {OPENING: "The number is task 3: guess a number from 0 to 9 (7)."}}
    )
    words = ["no", '```json\n{"guess": 4}\n```', '{"guess": 3}']
    sample = in_loop(server, lambda: play(loop, tokenizer, words, prompt))
    assert [each["content"] for each in sample.extra["messages"][1::2]] == [
        "error: write one JSON object",
        "The number is higher.",
    ]


def test_tools_are_called(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv(tasks=None, tools=True)
    with server.beside():
        rows = first_rows(source(server, tools=True, prompt="Buy {metadata.wanted}."), 1)
    assert rows[0]["prompt"] == "Buy two apples."
    loop = loop_of(source(server, tools=True), tool_parser="hermes")
    words = [
        call("buy", item="apples") + call("buy", item="pears") + call("sell", item="pears"),
        "<tool_call>\nnothing\n</tool_call>",
        "Done.",
    ]
    sample = in_loop(server, lambda: play(loop, tokenizer, words, prompt_of(rows[0])))
    assert sample.tools[0]["function"]["parameters"]["required"] == ["item"]
    answers = [each["content"] for each in sample.extra["messages"] if each["role"] != "assistant"]
    assert answers[:3] == [
        "you have 1 apples",
        "error: Error calling tool 'buy': there are no pears",
        "error: Unknown tool: 'sell'",
    ]
    assert sample.extra["invalid_actions"] == 2
    assert sample.finish_reason is FinishReason.STOP


def test_an_environment_that_opens_otherwise_fails_the_sample(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    server.opens = "another game"
    loop = loop_of(source(server))
    error = failure(server, lambda: play(loop, tokenizer, ["1"], prompt_of(row(3))))
    assert str(error) == (
        "the environment opened with 'another game', but its row has 'task 3: guess a number from 0 to 9 (7)'"
    )
    assert not server.sessions


def test_a_broken_step_fails_the_sample(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    loop = loop_of(source(server))
    error = failure(server, lambda: play(loop, tokenizer, ["11"], prompt_of(row(3))))
    assert str(error) == f"{server.url}: EXECUTION_ERROR: the environment broke"
    assert not server.sessions


def test_many_samples_share_few_places(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv(places=3)
    loop = loop_of(source(server))

    async def samples() -> list[Sample]:
        games = (play(loop, tokenizer, ["0", "1", str(index % 10)], prompt_of(row(index))) for index in range(2, 26))
        return await asyncio.gather(*games)

    made = in_loop(server, samples)
    assert all(sample.status is SampleStatus.COMPLETED for sample in made)
    assert server.most == 3
    assert server.refused < 24 * 8  # they stand in a line: not all of them ask again and again


def test_a_server_that_comes_back_is_used_again(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv()
    loop = loop_of(source(server))

    async def late() -> Sample:
        playing = asyncio.create_task(play(loop, tokenizer, ["3"], prompt_of(row(3))))
        await asyncio.sleep(0.3)
        async with server.serving():
            return await playing

    sample = asyncio.run(asyncio.wait_for(late(), PATIENCE_S))
    assert sample.extra["environment_reward"] == 1.0


@pytest.mark.parametrize("places", [0, None])
def test_a_sample_that_gets_no_place_says_why(tokenizer: HfTokenizer, places: int | None) -> None:
    server = PlayedOpenEnv(places=places or 0)
    loop = loop_of(source(server), setup_timeout_s=0.5)

    async def run() -> Sample:
        return await play(loop, tokenizer, ["3"], prompt_of(row(3)))

    with pytest.raises(SampleFailed) as raised:
        asyncio.run(run()) if places is None else in_loop(server, run)
    assert raised.value.kind is FailureKind.ENVIRONMENT
    reason = "cannot connect" if places is None else "CAPACITY_REACHED: Server at capacity"
    assert str(raised.value).startswith(f"the environment's setup took longer than 0.5 s: {reason}")


def test_a_lost_socket_fails_only_samples_with_an_episode(tokenizer: HfTokenizer) -> None:
    server = PlayedOpenEnv(places=2)
    loop = loop_of(source(server))

    class Slow(Model):
        async def generate(self, request: Any) -> Any:
            if len(self.requests) == 1:
                reached.release()
                await lost.wait()
            return await super().generate(request)

    reached, lost = asyncio.Semaphore(0), asyncio.Event()

    async def run() -> list[Any]:
        games = [
            asyncio.create_task(loop.run(rollout(Slow(tokenizer, ["1", str(index)]), prompt_of(row(index)))))
            for index in range(2, 8)
        ]
        for _ in range(2):
            await reached.acquire()
        server.lose_sockets()
        lost.set()
        return await asyncio.gather(*games, return_exceptions=True)

    made = in_loop(server, run)
    failed = [each for each in made if isinstance(each, SampleFailed)]
    assert len(failed) == 2
    assert all("the socket was lost" in str(error) and error.kind is FailureKind.ENVIRONMENT for error in failed)
    assert sum(isinstance(each, Sample) and each.extra["environment_reward"] == 0.75 for each in made) == 4


def test_a_server_that_answers_no_ping_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.2)
    server = PlayedOpenEnv()
    server.silent = True

    async def run() -> None:
        opened = await Session.connect(server.url)
        try:
            await opened.ask("reset", {"seed": 1})
            with pytest.raises(SessionLost, match="No PONG received"):
                await opened.ask("step", {"guess": 1})
            with pytest.raises(SessionLost, match="the session has ended"):
                await opened.ask("step", {"guess": 1})
        finally:
            await opened.close()

    in_loop(server, run)
    assert [each["type"] for each in server.seen] == ["reset", "step"]


def test_a_server_that_takes_too_long_to_connect_is_refused_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_long(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("aiohttp.ClientSession.ws_connect", too_long)
    with pytest.raises(SessionLost, match=r"^cannot connect: TimeoutError$"):
        asyncio.run(Session.connect("http://127.0.0.1:9"))


def test_pings_are_answered_between_two_steps() -> None:
    server = PlayedOpenEnv()

    async def run() -> None:
        opened = await Session.connect(server.url)
        await opened.ask("reset", {"seed": 1})
        [socket] = server.sessions
        await socket.ping()
        while not server.pongs:
            await asyncio.sleep(0.01)
        await opened.close()

    in_loop(server, run)


def test_a_step_that_is_given_up_ends_its_session(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    server = PlayedOpenEnv()
    server.silent = True
    loop = loop_of(source(server), step_timeout_s=0.2)
    error = failure(server, lambda: play(loop, tokenizer, ["3"], prompt_of(row(3))))
    assert str(error) == "a step of the environment took longer than 0.2 s"
    assert not server.sessions


def test_a_row_without_an_episode_is_the_prompts_fault() -> None:
    with pytest.raises(SampleFailed, match="export the rows again") as raised:
        asyncio.run(Episode("http://127.0.0.1:1").setup(Prompt("?"), "session"))
    assert raised.value.kind is FailureKind.PROMPT


def test_the_check_of_a_good_server_finds_nothing_wrong() -> None:
    with PlayedOpenEnv(places=20).beside() as server:
        made = source(server)
        found = list(made.check(first_rows(made, 20)))
        assert {each.level for each in found} == {Level.NOTE}
        assert server.most == 16
        assert not server.sessions


def test_the_check_finds_what_is_wrong() -> None:
    with PlayedOpenEnv().beside() as server:
        made = source(server)
        rows = first_rows(made, 2)
        server.opens = "another game"
        found = list(made.check(rows))
        assert [each.row for each in found if each.level is Level.ERROR and "opened with" in each.text] == [0, 1]
        server.opens = ""
        wrong = source(server, action={"gues": "{text}"})
        texts = {each.text for each in wrong.check(rows) if each.level is Level.ERROR}
        assert texts == {"actions have no field 'gues'", "actions need the field 'guess'"}
    gone = [each.text for each in made.check(rows)]
    assert len(gone) == 1
    assert "no server answers at" in gone[0]


def test_a_files_settings_name_the_kinds_loop(tmp_path: Path) -> None:
    made = source(PlayedOpenEnv(), tools=True, reset={"level": 2})
    assert made.settings() == {
        "answer_field": "",
        "judge": "environment",
        "agent_loop": "environment",
        "agent_options": {
            "environment": "rollq.environments.openenv.episode.ToolEpisode",
            "options": {"url": made.url, "reset": {"level": 2}},
            "setup_timeout_s": 600.0,
            "tool_parser": "auto",
        },
    }
    assert made.identity()["options"] == '{"reset":{"level":2},"tools":true}'
