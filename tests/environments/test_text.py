"""The kind `text`: environments in child processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample
from rollq.environments.episodes import row_seed
from rollq.environments.kinds import Finding, Level, kind_named
from rollq.environments.text.kind import Text, TextSource
from rollq.environments.text.processes import end_children
from rollq.environments.trials import AT_ONCE, prompt_of
from rollq.workers.agents.loops import AgentLoop
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support import text_games
from support.chat_engine import Model, chat_tokenizer, rollout
from support.environment_rows import first_rows
from support.waiting import PATIENCE_S, wait_until

GAMES = text_games.__name__
ROWS_AT_ONCE = "rollq.environments.text.kind.AT_ONCE"


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are made at once, and not sixteen: each starts a process, and most tests need one row."""
    monkeypatch.setattr(ROWS_AT_ONCE, 2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def source(game: str = "Guess", **options: Any) -> TextSource:
    return Text().open(f"{GAMES}.{game}", options, "train")


def loop_of(made: TextSource, **more: Any) -> AgentLoop:
    settings = made.settings()
    return make_loop(settings["agent_loop"], settings["agent_options"] | more)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` returns; no process is left."""

    async def to_the_end() -> Any:
        try:
            return await work()
        finally:
            await end_children()

    result = asyncio.run(asyncio.wait_for(to_the_end(), PATIENCE_S))
    assert [child for child in psutil.Process().children() if "text.child" in " ".join(child.cmdline())] == []
    return result


def play(loop: AgentLoop, tokenizer: HfTokenizer, words: Sequence[str], prompt: Prompt) -> Awaitable[Sample]:
    return loop.run(rollout(Model(tokenizer, words), prompt))


def failure(tokenizer: HfTokenizer, words: Sequence[str], **limits: float) -> str:
    """Why the sample of these words fails, while another one beside it ends well, and a later one too."""
    made = source()
    [row] = first_rows(made, 1)
    loop = loop_of(made, **limits)

    async def three() -> Any:
        good = ("0", "1", "2", "3")
        failed, beside = await asyncio.gather(
            play(loop, tokenizer, words, prompt_of(row)),
            play(loop, tokenizer, good, prompt_of(row)),
            return_exceptions=True,
        )
        return failed, beside, await play(loop, tokenizer, good, prompt_of(row))

    failed, *others = run(three)
    assert all(isinstance(other, Sample) for other in others)
    assert isinstance(failed, SampleFailed)
    assert failed.kind is FailureKind.ENVIRONMENT
    return str(failed)


def test_rows_are_seeds_and_open_alike_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROWS_AT_ONCE, AT_ONCE)
    made = source(seed=3, options={"most": 5})
    rows = first_rows(made, 20)
    assert rows == first_rows(made, 20)
    assert [row["env"]["seed"] for row in rows] == [row_seed(3, "train", index) for index in range(20)]
    assert len({row["prompt"] for row in rows}) > 10
    assert all(row["prompt"].endswith("guess a number from 0 to 5.") for row in rows)
    assert kind_named("text").open(made.path, {}, "train").identity()["package"] == "support"


def test_a_game_is_played(tokenizer: HfTokenizer) -> None:
    made = source()
    [row] = first_rows(made, 1)
    words = [str(number) for number in range(4)]
    sample = run(lambda: play(loop_of(made), tokenizer, words, prompt_of(row)))
    right = 1.0 in sample.extra["turn_rewards"]
    assert sample.finish_reason is (FinishReason.STOP if right else FinishReason.LENGTH)
    again = run(lambda: play(loop_of(made), tokenizer, words, prompt_of(row)))
    assert again.extra == sample.extra


def test_a_truncated_episode_is_judged(tokenizer: HfTokenizer) -> None:
    made = source(options={"most": 10**9})
    [row] = first_rows(made, 1)
    sample = run(lambda: play(loop_of(made), tokenizer, ["0", "1", "2", "3"], prompt_of(row)))
    assert sample.finish_reason is FinishReason.LENGTH
    assert sample.extra["turn_rewards"] == [0.0] * 4


def test_numbers_are_actions_of_a_discrete_space(tokenizer: HfTokenizer) -> None:
    made = source("Grid")
    [row] = first_rows(made, 1)
    assert row["prompt"] == '{"place": 0}'
    sample = run(lambda: play(loop_of(made), tokenizer, ["go", "7", "2", "2"], prompt_of(row)))
    assert sample.extra["turn_rewards"] == [0.0, 0.0, 0.5, 0.5]
    assert sample.extra["invalid_actions"] == 2
    answers = [each["content"] for each in sample.extra["messages"] if each["role"] == "user"]
    assert answers[:3] == [
        "error: write a whole number",
        "error: 7 is not in Discrete(3)",
        '{"place": 2}',
    ]


def test_rows_may_have_their_own_arguments(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_text(
        '{"answer": "yes", "prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Yes?"}]}\n'
        '{"answer": "no", "prompt": [{"role": "user", "content": "No?"}]}\n'
    )
    made = source("Words", episodes=str(file))
    first, second = made.rows()
    assert first["messages"][0] == {"role": "system", "content": "Play."}
    assert second["prompt"] == "No?"
    sample = run(lambda: play(loop_of(made), tokenizer, ["perhaps", "yes"], prompt_of(first)))
    assert [each["content"] for each in sample.extra["messages"]] == ["perhaps", "no", "yes"]
    file.write_text("{}\n[]\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is not a JSON object"):
        next(made.rows())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("die", f"{GAMES}.Guess: its process ended with exit code 3"),
        ("leave", f"{GAMES}.Guess: SystemExit: I leave"),
        ("nan", f"{GAMES}.Guess: ValueError: Out of range float values are not JSON compliant"),
        ("a word", f"{GAMES}.Guess: ValueError: invalid literal for int() with base 10: 'a word'"),
    ],
)
def test_a_process_that_breaks_fails_its_sample_alone(tokenizer: HfTokenizer, words: str, reason: str) -> None:
    assert failure(tokenizer, [words]).startswith(reason)


def test_a_process_that_hangs_is_killed(tokenizer: HfTokenizer) -> None:
    reason = failure(tokenizer, ["hang"], step_timeout_s=3.0)
    assert reason == "a step of the environment took longer than 3 s"


def test_a_process_that_dies_between_two_episodes_is_replaced(tokenizer: HfTokenizer) -> None:
    made = source()
    [row] = first_rows(made, 1)
    loop = loop_of(made)

    async def two() -> Sample:
        before = await play(loop, tokenizer, ["process", "0", "1", "2", "3"], prompt_of(row))
        os.kill(int(before.extra["messages"][1]["content"]), signal.SIGKILL)
        return await play(loop, tokenizer, ["0", "1", "2", "3"], prompt_of(row))

    assert isinstance(run(two), Sample)


@pytest.mark.parametrize("game", ["Guess", "Shared"])
def test_sixteen_at_once_have_a_process_each_unless_they_are_isolated(tokenizer: HfTokenizer, game: str) -> None:
    made = source(game)
    rows = first_rows(made, 16)
    loop = loop_of(made)

    async def play_all() -> list[Sample]:
        words = ["process", "0", "1", "2", "3"]
        return await asyncio.gather(*(play(loop, tokenizer, words, prompt_of(row)) for row in rows))

    samples = run(play_all)
    processes = {sample.extra["messages"][1]["content"] for sample in samples}
    assert (len(processes) == 1) == (game == "Shared")


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    row = first_rows(source(), 1)[0]
    program = f"""
import asyncio
from rollq.environments.text.episode import TextEpisode
from rollq.environments.trials import prompt_of

async def main():
    episode = TextEpisode("{GAMES}.Guess")
    await episode.setup(prompt_of({row!r}), "session")
    step = await episode.step("process")
    print(step.messages[0]["content"], flush=True)
    await episode.step("hang")

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    wait_until(lambda: has_ended(child))


def has_ended(number: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    return True


def test_all_that_a_process_started_is_killed_with_it(tokenizer: HfTokenizer) -> None:
    made = source()
    [row] = first_rows(made, 1)
    loop = loop_of(made, step_timeout_s=3.0)
    model = Model(tokenizer, ["start", "hang"])

    async def one() -> None:
        with pytest.raises(SampleFailed):
            await loop.run(rollout(model, prompt_of(row)))

    run(one)
    said = tokenizer.decode(model.requests[1].prompt_ids.tolist())
    started = int(said.rsplit("user: ", 1)[1].split("\n")[0])
    wait_until(lambda: has_ended(started))


def test_the_check_of_a_good_game_finds_nothing_wrong() -> None:
    made = source()
    assert levels(made.check(first_rows(made, 20))) == {Level.NOTE}


def test_the_check_finds_openings_that_change() -> None:
    made = source("Secret")
    found = list(made.check(first_rows(made, 2)))
    errors = [(each.row, each.text) for each in found if each.level is Level.ERROR]
    assert [row for row, _ in errors] == [0, 1]
    assert all(text.startswith("the environment opened with") for _, text in errors)


def levels(found: Any) -> set[Level]:
    findings: list[Finding] = list(found)
    return {each.level for each in findings}


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("NoSuchGame", {}, f"{GAMES}.NoSuchGame.*: AttributeError: module '{GAMES}' has no attribute 'NoSuchGame'"),
        ("NoGame", {}, "NoGame has neither reset and step nor init and step"),
        ("Guess", {"options": {"colour": "red"}}, "TypeError: .* unexpected keyword argument 'colour'"),
        ("Guess", {"python": "/nowhere/python"}, "/nowhere/python cannot be run: .*No such file"),
        ("Guess", {"episodes": "/nowhere.jsonl"}, "env_options.episodes = .*No such file"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        next(source(name, **options).rows())


@pytest.mark.parametrize("name", ["games", "games.Guess()", ".Guess", "games:Guess"])
def test_the_name_is_a_dotted_path(name: str) -> None:
    with pytest.raises(ConfigError, match="write a dotted path"):
        Text().open(name, {}, "train")


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"env_options\.wrong: unknown key"):
        Text().open("games.Guess", {"wrong": 1}, "train")
