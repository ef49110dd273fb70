"""The kind `text` with TextArena, which another Python has."""

import asyncio
from typing import Any

import pytest

from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.environments.kinds import Level
from rollq.environments.text.kind import Text, TextSource
from rollq.environments.text.processes import end_children
from rollq.environments.trials import prompt_of
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support import text_games
from support.chat_engine import Model, chat_tokenizer, rollout
from support.environment_pythons import ENVIRONMENTS
from support.environment_rows import first_rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def arena(game: str, **options: Any) -> TextSource:
    return Text().open("textarena.make", {"python": str(ENVIRONMENTS), "options": {"env_id": game}, **options}, "train")


def play(made: TextSource, tokenizer: HfTokenizer, words: list[str], rows: list[dict[str, Any]]) -> list[Sample]:
    settings = made.settings()
    loop = make_loop(settings["agent_loop"], settings["agent_options"] | {"max_turns": 30})

    async def play_all() -> list[Sample]:
        try:
            prompts = (prompt_of(row) for row in rows)
            games = (
                loop.run(rollout(Model(tokenizer, words), prompt, max_tokens=100_000, max_prompt_tokens=100_000))
                for prompt in prompts
            )
            return await asyncio.gather(*games)
        finally:
            await end_children()

    return asyncio.run(play_all())


def test_the_version_is_the_other_pythons() -> None:
    assert arena("GuessTheNumber-v0").identity()["version"].startswith("0.")


@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "FrozenLake-v0-random", "LightsOut-v0", "Mastermind-v0"])
def test_games_open_alike_sixteen_at_once(game: str) -> None:
    made = arena(game)
    rows = first_rows(made, 16)
    assert len(rows) == 16
    assert {each.level for each in made.check(rows)} == {Level.NOTE}
    assert rows == first_rows(made, 16)


def test_a_game_is_won_sixteen_times_at_once(tokenizer: HfTokenizer) -> None:
    made = arena("GuessTheNumber-v0", options={"env_id": "GuessTheNumber-v0", "max_turns": 30})
    rows = first_rows(made, 16)
    words = [f"[{number}]" for number in range(1, 21)]
    samples = play(made, tokenizer, words, rows)
    assert [sample.extra["environment_reward"] for sample in samples] == [1.0] * 16
    assert {sample.finish_reason for sample in samples} == {FinishReason.STOP}
    turns = [len(sample.extra["turn_rewards"]) for sample in samples]
    assert len(set(turns)) > 4  # the seeds hide other numbers
    hints = {each["content"] for sample in samples for each in sample.extra["messages"] if each["role"] == "user"}
    assert hints == {"The target number is higher.", "Congratulations! You guessed the correct number."}
    assert [len(again.extra["turn_rewards"]) for again in play(made, tokenizer, words, rows)] == turns


def test_a_class_of_ours_runs_in_another_python(tokenizer: HfTokenizer) -> None:
    options = {"python": str(ENVIRONMENTS)}
    made = Text().open(f"{text_games.__name__}.Guess", options, "train")
    rows = first_rows(made, 16)
    assert rows == first_rows(Text().open(made.path, {}, "train"), 16)
    samples = play(made, tokenizer, ["0", "1", "2", "3"], rows)
    assert {len(sample.extra["turn_rewards"]) for sample in samples} <= {1, 2, 3, 4}
