"""The kind `verifiers` with the real package, in a separate Python."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, SampleStatus
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, Model, call, chat_tokenizer
from support.environment_pythons import ENVIRONMENTS
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
