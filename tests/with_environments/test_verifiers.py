"""The kind `verifiers` with the real package, in a separate Python."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, SampleStatus
from rollq.environments.kinds import Level
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, Model, call, chat_tokenizer
from support.environment_pythons import ENVIRONMENTS, ROOT
from support.played_verifiers import TASK_SETS, all_of, playing, rows_of, run, task_set


@dataclass
class SlowModel(Model):
    """Never answers."""

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(3600)
        raise AssertionError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASK_SETS))
    monkeypatch.setenv("PATH", f"{ENVIRONMENTS.parent}:{os.environ['PATH']}")  # uv, which verifiers' harnesses need


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(TASK_SETS))
        return rows_of(task_set(), 20)


def test_an_answer_is_rewarded_and_a_broken_task_fails(tokenizer: HfTokenizer, rows: list[dict[str, Any]]) -> None:
    async def work() -> None:
        async with playing(task_set(), tokenizer) as played:
            right, wrong, grader, setup = await all_of(
                played.play(rows[0], ["1"]),
                played.play(rows[1], ["3"]),
                played.play(rows[3], ["4"]),
                played.play(rows[4], ["5"]),
            )
        assert (right.reward, right.reward_parts, right.text) == (3.0, {"right": 2.0, "short": 1.0}, "1")
        assert right.extra["program"] == {"metrics": {"turns": 1.0}, "stop": "agent_completed"}
        assert right.finish_reason is FinishReason.STOP
        assert (wrong.reward, wrong.reward_parts) == (1.0, {"right": 0.0, "short": 1.0})
        assert (grader.status, grader.failure) == (SampleStatus.FAILED, FailureKind.GRADER)
        assert "the grader is broken" in (grader.error or "")
        assert (setup.status, setup.failure) == (SampleStatus.FAILED, FailureKind.ENVIRONMENT)
        assert "the setup is broken" in (setup.error or "")

    run(work)


def test_the_model_calls_tools_and_reads_what_is_wrong(tokenizer: HfTokenizer) -> None:
    made = task_set(config={"taskset": {"task": {"tools": True}, "system": True}})
    (row,) = rows_of(made, 1)
    assert row["messages"][0] == {"role": "system", "content": "Only the number."}
    words = [
        call("add", one=0, other=1),
        call("add", one=13, other=1),
        call("multiply", one=1),
        call("add", one="x"),
        "1",
    ]

    async def work() -> None:
        async with playing(made, tokenizer) as played:
            begun_s = time.monotonic()
            sample = await played.play(row, words)
            print("seconds", time.monotonic() - begun_s)
            again_s = time.monotonic()
            await played.play(row, ["1"])
            print("seconds", time.monotonic() - again_s)
        assert sample.status is SampleStatus.COMPLETED, sample.error
        assert (sample.reward, sample.text) == (3.0, "1")
        results = [message["content"] for message in sample.extra["messages"] if message["role"] == "tool"]
        assert results[0] == "1"
        assert "no thirteens" in results[1]
        assert results[2] == "error: there is no tool 'multiply'; the tools are: add"
        assert "one" in results[3]
        assert sample.tools[0]["function"]["name"] == "add"

    run(work)


def test_a_conversation_that_outgrows_the_context_is_judged(tokenizer: HfTokenizer, rows: list[dict[str, Any]]) -> None:
    made = task_set(config={"taskset": {"task": {"tools": True}}})

    async def work() -> None:
        async with playing(made, tokenizer) as played:
            grown = await played.play(rows[0], [call("add", one=0, other=1)] * 20, max_tokens=300)
            cut = await played.play(rows[0], ["1" * 500], max_tokens=100)
        assert (grown.status, grown.reward, grown.error) == (SampleStatus.COMPLETED, 0.0, None)
        assert grown.finish_reason is FinishReason.LENGTH
        assert (cut.finish_reason, cut.reward) == (FinishReason.LENGTH, 0.0)

    run(work)


def test_the_model_s_words_stay_as_the_engine_made_them(tokenizer: HfTokenizer, rows: list[dict[str, Any]]) -> None:
    made = task_set(config={"taskset": {"task": {"tools": True}}})
    words = [call("add", one=0, other=1), "one  or\t1"]

    async def work() -> None:
        async with playing(made, tokenizer) as played:
            sample = await played.play(rows[0], words)
        (segment,) = sample.segments
        mask = segment.loss_mask
        assert mask is not None
        trained = segment.response_ids[mask.astype(bool)].tolist()
        assert trained == [token for said in words for token in [*tokenizer.encode(said), EOS]]
        assert set(segment.logprobs[mask.astype(bool)].tolist()) == {-0.25}
        assert tokenizer.decode(segment.response_ids.tolist()).count("tool: 1") == 1

    run(work)


@pytest.mark.parametrize("harness", ["inside", "null"])
def test_sessions_of_a_killed_runner_fail_at_once(
    tokenizer: HfTokenizer, rows: list[dict[str, Any]], harness: str
) -> None:
    async def work() -> None:
        async with playing(task_set(harness=harness), tokenizer) as played:
            first = await played.play(rows[0], ["1"])
            assert first.reward == 3.0, first.error
            model = SlowModel(tokenizer, ["2"])
            lost = asyncio.create_task(played.play_with(rows[1], model))
            while not model.requests:
                await asyncio.sleep(0.05)
            (runner,) = psutil.Process(played.launcher).children()
            left = psutil.Process(played.launcher).children(recursive=True)
            os.kill(runner.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            sample = await lost
            assert time.monotonic() - killed_s < 10  # 1 s on a machine that does nothing else
            assert (sample.status, sample.failure) == (SampleStatus.FAILED, FailureKind.PROGRAM)
            assert sample.error == "the runner of verifiers died of signal 9"
            assert not [process for process in left if process.is_running()]
            again = await played.play(rows[2], ["3"])
            assert again.reward == 3.0

    run(work)


def test_a_tool_set_that_dies_is_noticed_at_once(tokenizer: HfTokenizer) -> None:
    made = task_set("rollq_faulty_tools")
    (row,) = rows_of(made, 1)

    async def work() -> None:
        async with playing(made, tokenizer) as played:
            sample = await played.play(row, ["1"])
        assert sample.failure is FailureKind.TOOL
        error = sample.error or ""
        assert "toolset Dying ended with exit code 1 before it was up" in error
        assert "the index is missing" in error

    run(work)


def test_an_environment_that_cannot_be_trained_is_refused() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("rollq_sumz", {}, r"taskset 'rollq_sumz' not found .* Did you mean rollq_sums\?"),
        (
            "rollq_sums",
            {"config": {"id": "user_sim"}},
            r"would play 2 seats \(assistant, user\), but a sample trains one",
        ),
        ("rollq_sums", {"config": {"taskset": {"task": {"tool": True}}}}, "tool"),
        ("rollq_sums", {"harness": "nul"}, "harness 'nul' not found .* null"),
        ("rollq_unstarted_tools", {}, r"rollq_unstarted_tools\.py must end with: .* Dying\.run\(\)"),
    ]
    for name, options, said in wrong:
        with pytest.raises(ConfigError, match=said):
            rows_of(task_set(name, **options), 1)


def test_a_split_is_the_set_s_and_other_rows_are_the_same_again(rows: list[dict[str, Any]]) -> None:
    assert rows_of(task_set(), 20) == rows
    assert rows_of(task_set(split="test"), 1)[0]["prompt"] == "1000+1?"


def test_a_check_plays_episodes_without_a_model() -> None:
    made = task_set()
    found = [(each.level, each.text, each.row) for each in made.check(rows_of(made, 20))]
    errors = [(text, row) for level, text, row in found if level is Level.ERROR]
    assert [row for _, row in errors] == [3, 4]
    assert errors[0][0].endswith("the grader is broken")
    assert errors[1][0].startswith("1 of 16 episodes fail: environment")
    notes = [text for level, text, _ in found if level is not Level.ERROR]
    assert notes[0].startswith('the answer "0" earns 1 on average')


def test_limits_end_an_episode_and_a_grader_that_hangs_fails_it(
    tokenizer: HfTokenizer, rows: list[dict[str, Any]]
) -> None:
    made = task_set(
        config={"taskset": {"task": {"tools": True}}, "agent": {"max_turns": 2, "timeout": {"scoring": 3}}},
    )
    words = [call("add", one=0, other=1)] * 9

    async def work() -> None:
        async with playing(made, tokenizer) as played:
            turns, hung = await all_of(played.play(rows[0], words), played.play(rows[5], words))
        assert (turns.finish_reason, turns.reward, len(turns.extra["calls"])) == (FinishReason.LENGTH, 1.0, 2)
        assert turns.extra["program"]["stop"] == "max_turns"
        assert hung.failure is FailureKind.GRADER
        assert "these rewards were not computed: " in (hung.error or "")

    run(work)


def test_many_sessions_leave_nothing_in_a_runner(tokenizer: HfTokenizer, rows: list[dict[str, Any]]) -> None:
    async def work() -> None:
        async with playing(task_set(concurrent=32), tokenizer) as played:
            places = asyncio.Semaphore(32)

            async def play(number: int) -> None:
                async with places:
                    row = number % 3
                    sample = await played.play(rows[row], [str(row + 1)])
                    assert sample.reward == 3.0, sample.error

            await all_of(*map(play, range(150)))
            (runner,) = psutil.Process(played.launcher).children()
            files, memory = runner.num_fds(), runner.memory_info().rss
            await all_of(*map(play, range(450)))
            assert runner.num_fds() <= files + 40  # connections that wait for a call
            assert runner.memory_info().rss <= memory + 30_000_000

    run(work)


def test_a_runner_elsewhere_takes_sessions_and_hides_the_key(
    tokenizer: HfTokenizer, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLQ_GATEWAY_KEY", "the secret")

    async def work() -> None:
        async with playing(task_set(runners=0), tokenizer) as played:
            variables = {**os.environ, "PYTHONPATH": f"{TASK_SETS}:{ROOT}/environments"}
            command = ["-m", "rollq.environments.verifiers.runner", "--gateway", played.gateway.url]
            process = await asyncio.create_subprocess_exec(str(ENVIRONMENTS), *command, env=variables)
            try:
                sample = await played.play(rows[0], ["1"])
                assert sample.reward == 3.0, sample.error
                assert b"the secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
            finally:
                process.kill()
                await process.wait()

    run(work)
