"""Judges that run in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import support
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Segment, VersionSpan
from rollq.workers.judging.environment import known_to_be_harmless, most_memory
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from support.judge_doubles import burning_judge, made, question, sample
from support.waiting import PATIENCE_S

DIED = "judge 'support.judge_doubles.{}': its process {}"


async def judged(judge: Judge, text: str, prompt: Prompt | None = None) -> Verdict:
    return await judge.judge(prompt or question(), sample(text))


def test_an_isolated_judge_runs_in_another_process() -> None:
    async def scene() -> tuple[Verdict, Verdict]:
        async with made("pid_judge") as inside, made("pid_judge", isolate=True) as isolated:
            return await judged(inside, ""), await judged(isolated, "")

    inside, isolated = asyncio.run(scene())
    assert inside.reward == os.getpid()
    assert isolated.reward not in (os.getpid(), None)
    with pytest.raises(ConfigError, match="is async"):
        make_judge("support.judge_doubles.async_judge", {}, JudgeContext(30, JudgePool(1), isolate=True))


def test_an_isolated_judge_gets_all_of_prompt_and_sample() -> None:
    segment = Segment(
        np.array([1], np.int32), np.array([2], np.int32), np.array([-0.5], np.float32), (VersionSpan(1, 7, 1),)
    )
    whole = Sample(segments=(segment,), status=SampleStatus.COMPLETED, text="x" * 1_000_000)

    async def scene() -> Verdict:
        async with made("copied_judge", isolate=True) as judge:
            return await judge.judge(question({"deep": [1, "x"]}), whole)

    assert asyncio.run(scene()) == Verdict(1_000_002, {"prompt": 1.0, "sample": 1.0, "text": 1_000_000.0})


def test_a_judge_sees_no_password_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"ROLLQ_REDIS_PASSWORD": "planted", "HF_TOKEN": "planted", "OPENAI_API_KEY": "planted"}
    secrets |= {"REDIS_URL": "planted", "AWS_SECRET_ACCESS_KEY": "planted", "PGPASSWORD": "planted"}
    secrets |= {"GITHUB_PAT": "planted", "MY_APIKEY": "planted", "MYSQL_PWD": "planted", "SLACK_WEBHOOK": "planted"}
    secrets |= {"http_proxy": "http://me:planted@proxy:3128", "HUGGING_FACE_HUB_TOKEN": "planted", "HF_PAT": "planted"}
    harmless = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HTTPS_PROXY": "http://proxy:3128"}
    harmless |= {"LC_ALL": "C.UTF-8", "HF_HOME": "/models", "CUDA_VISIBLE_DEVICES": "0", "PYTHONHASHSEED": "0"}
    for name, value in (secrets | harmless).items():
        monkeypatch.setenv(name, value)

    async def scene() -> bytes:
        async with made("pid_judge", isolate=True) as judge:
            pid = int((await judged(judge, "")).reward or 0)
            return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()

    seen = asyncio.run(scene())
    assert b"planted" not in seen
    assert all(f"{name}={value}".encode() in seen for name, value in harmless.items())


def test_a_judge_gets_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_URL", "http://sandbox")
    monkeypatch.setenv("SANDBOX_KEY", "mine")
    assert known_to_be_harmless(os.environ, ["SANDBOX_KEY"])["SANDBOX_KEY"] == "mine"
    assert "SANDBOX_URL" not in known_to_be_harmless(os.environ, ["SANDBOX_KEY"])
    with pytest.raises(ConfigError, match=r"judge_environment: the worker has no environment variable 'SANDBOX_UR'"):
        JudgePool(1, ["SANDBOX_UR"])


def test_a_judge_that_wants_too_much_memory_costs_its_sample_alone() -> None:
    async def scene(processes: JudgePool) -> None:
        greedy, other = isolated(processes, "greedy_judge"), isolated(processes, "pid_judge")
        verdict = await judged(greedy, str(most_memory()))
        assert "MemoryError" in str(verdict.error)
        assert "a judge may use half of the memory" in str(verdict.error)
        assert (await judged(other, "")).reward
        assert (await judged(greedy, "1000")).reward == 1000

    with_processes(1, scene)


def isolated(processes: JudgePool, name: str, timeout_s: float = PATIENCE_S) -> Judge:
    return make_judge(f"support.judge_doubles.{name}", {}, JudgeContext(timeout_s, processes, isolate=True))


def with_processes(count: int, scene: Callable[[JudgePool], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        processes = JudgePool(count)
        try:
            await scene(processes)
        finally:
            await processes.close()

    asyncio.run(run())


def test_sb10_an_isolated_judge_that_hangs_or_crashes_costs_its_sample_alone() -> None:
    """Even one that holds the interpreter and hears no signal; the others use the same two processes."""

    async def scene(processes: JudgePool) -> None:
        judges = [
            isolated(processes, "endless_judge", timeout_s=1),
            isolated(processes, "crashing_judge"),
            isolated(processes, "exiting_judge"),
            *[isolated(processes, "pid_judge")] * 6,
        ]
        endless, crashed, exited, *others = await asyncio.gather(*(judged(judge, "") for judge in judges))
        assert endless.error == "judge 'support.judge_doubles.endless_judge': took longer than 1 s"
        assert crashed.error == DIED.format("crashing_judge", "died of SIGSEGV")
        assert exited.error == DIED.format("exiting_judge", "ended with exit code 4")
        assert all(other.reward is not None for other in others)

    with_processes(2, scene)


def test_whatever_a_judge_does_its_process_goes_on_with_the_next_sample() -> None:
    reasons = {
        "leave": "SystemExit: gone",
        "speechless": "NoWords",
        "two words": "TwoWords: one other",
        "surrogate": "ValueError: ?",
        "deep": "RecursionError: maximum recursion depth exceeded",
        "function": "ValueError: returned <function",
        "nan": "ValueError: returned nan; expected a finite number",
    }

    async def scene(processes: JudgePool) -> None:
        pid = await judged(isolated(processes, "pid_judge"), "")
        bad = isolated(processes, "bad_judge")
        for text, reason in reasons.items():
            error = (await judged(bad, text)).error
            assert error is not None
            assert error.startswith(f"judge 'support.judge_doubles.bad_judge': {reason}")
        assert await judged(bad, "printing") == Verdict(1.0)
        assert await judged(bad, "input") == Verdict(0.0)
        assert await judged(isolated(processes, "pid_judge"), "") == pid

    with_processes(1, scene)


def test_what_cannot_be_sent_costs_its_sample_alone() -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]

    async def scene(processes: JudgePool) -> None:
        judge = isolated(processes, "pid_judge")
        for prompt, text in ((question(deep), ""), (question(), "\ud800"), (question(object()), "")):
            assert (await judged(judge, text, prompt)).error is not None
        assert (await judged(judge, "")).reward is not None

    with_processes(1, scene)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_from_outside_cost_no_sample(number: signal.Signals) -> None:
    """Those that stop a whole process tree leave the samples that the worker still finishes a judge; a process that
    was killed while nobody used it is replaced."""

    async def scene(processes: JudgePool) -> None:
        judge = isolated(processes, "pid_judge")
        before = await judged(judge, "")
        assert before.reward is not None
        os.kill(int(before.reward), number)
        after = await judged(judge, "")
        assert after.reward is not None
        assert (after == before) == (number is not signal.SIGKILL)

    with_processes(1, scene)


def test_what_a_judge_forks_does_not_pass_for_its_process() -> None:
    async def scene(processes: JudgePool) -> None:
        left = (await judged(isolated(processes, "forking_judge"), "")).parts
        try:
            os.kill(int(left["own"]), signal.SIGKILL)
            assert (await judged(isolated(processes, "pid_judge"), "")).reward not in (left["own"], left["child"])
        finally:
            os.kill(int(left["child"]), signal.SIGKILL)

    with_processes(1, scene)


def test_a_judgement_that_nobody_waits_for_any_more_ends_with_all_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scene(processes: JudgePool) -> None:
        judging = asyncio.create_task(judged(isolated(processes, "spawning_judge", timeout_s=1000), str(pipe)))
        with await asyncio.to_thread(open, pipe, "rb") as output:
            assert await asyncio.to_thread(output.readline) == b"begun\n"
            judging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await judging
            assert await asyncio.to_thread(output.read) == b""  # ends when nobody writes there any more

    with_processes(1, scene)


async def turns(work: Callable[[], Any]) -> int:
    """Pauses between the event loop's turns while `work` ran."""
    found, done = 0, asyncio.ensure_future(work())
    while not done.done():
        await asyncio.sleep(0.005)
        found += 1
    return found


def test_the_event_loop_does_not_wait_for_a_judge_that_burns_the_cpu() -> None:
    """Inside the event loop, the same judge holds it up until it is done."""

    async def inline() -> None:
        burning_judge(Prompt("?"), sample("1"))

    async def scene(processes: JudgePool) -> None:
        judge = isolated(processes, "burning_judge")
        await judged(judge, "0")  # the process has started
        assert await turns(inline) == 1
        assert await turns(lambda: judged(judge, "1")) > 3  # about 150 on a quiet machine

    with_processes(2, scene)


PARENT = """
import asyncio
import sys

sys.path.insert(0, sys.argv[1])

from support.judge_doubles import JudgeContext, JudgePool, make_judge, question, sample

async def main():
    tools = JudgeContext(1000, JudgePool(2), isolate=True)
    busy = make_judge("support.judge_doubles.announced_judge", {}, tools)
    await asyncio.gather(*(busy.judge(question(), sample("")) for _ in range(2)))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process goes on until its call ends")
def test_the_processes_end_with_a_worker_that_is_killed_in_the_middle_of_calls(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(Path(support.__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stderr is not None
        assert [parent.stderr.readline() for _ in range(2)] == [b"endless\n"] * 2
        parent.kill()
        parent.communicate(timeout=PATIENCE_S)  # returns when nobody has its standard error open any more
