"""Built-in judges with options, and judges that run in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from aiohttp import web

from rollq.buffer.errors import ConfigError
from rollq.buffer.schema import Prompt, Sample, SampleStatus
from rollq.workers.judges import Judge, Tools, Verdict, make_judge
from rollq.workers.processes import JudgeProcesses

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.fixture(scope="module")
def processes() -> Iterator[JudgeProcesses]:
    made = JudgeProcesses(2)
    yield made
    made.close()


def sample(text: str) -> Sample:
    return Sample(segments=(), status=SampleStatus.COMPLETED, text=text)


def run(judge: Judge, text: str, answer: Any = "42") -> Verdict:
    return asyncio.run(judge.judge(Prompt("What is it?", answer=answer, metadata={"level": 3}), sample(text)))


def burning_judge(prompt: Prompt, judged: Sample) -> float:
    until_s = time.monotonic() + float(judged.text)
    while time.monotonic() < until_s:
        sum(range(1000))
    return 1.0


def endless_judge(prompt: Prompt, judged: Sample) -> float:
    while True:
        pass


def crashing_judge(prompt: Prompt, judged: Sample) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def pid_judge(prompt: Prompt, judged: Sample) -> float:
    return float(os.getpid())


async def async_judge(prompt: Prompt, judged: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is \\boxed{72}", GSM8K, 1),
        ("#### 72", GSM8K, 1),
        ("The answer is 72.0", GSM8K, 1),
        ("The answer is 71", GSM8K, 0),
        ("", GSM8K, 0),
        ("$\\frac{6}{8}$", "\\frac{3}{4}", 1),
        ("it is 0.5", "1/2", 1),
        ("$1 + x$", "x+1", 1),
        ("$x^2$", "x+1", 0),
        ("\\boxed{1,234}", "1234", 1),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$", 1),
        ("so much text and nothing else", "x+1", 0),
    ],
)
def test_math_compares_what_expressions_mean(processes: JudgeProcesses, text: str, answer: str, reward: float) -> None:
    assert run(make_judge("math", {}, Tools(30, processes)), text, answer) == Verdict(reward)


def test_an_answer_that_is_no_mathematics_cannot_be_judged(processes: JudgeProcesses) -> None:
    error = run(make_judge("math", {}, Tools(30, processes)), "42", "").error
    assert error is not None
    assert "'' is no expression" in error


@pytest.mark.parametrize(
    ("options", "text", "reward"),
    [
        ({"pattern": r"answer: (\w+)"}, "answer: 41, no, answer: 42", 1),
        ({"pattern": r"answer: (\w+)"}, "answer: 42, no, answer: 41", 0),
        ({"pattern": r"\d+"}, "it is 42 ", 1),
        ({"pattern": r"\d+"}, "no idea", 0),
        ({"pattern": r"^<think>.*</think>", "compare": False}, "<think>so</think> 7", 1),
        ({"pattern": r"^<think>.*</think>", "compare": False}, "7", 0),
    ],
)
def test_regex_takes_what_it_finds_last(
    processes: JudgeProcesses, options: dict[str, Any], text: str, reward: float
) -> None:
    assert run(make_judge("regex", options, Tools(30, processes)), text) == Verdict(reward)


def test_a_pattern_that_takes_for_ever_costs_its_sample_alone(processes: JudgeProcesses) -> None:
    judge = make_judge("regex", {"pattern": r"(a+)+$"}, Tools(1, processes))

    async def both() -> list[Verdict]:
        prompt = Prompt("?", answer="aaa")
        return await asyncio.gather(*(judge.judge(prompt, sample(text)) for text in ("a" * 64 + "b", "aaa")))

    assert asyncio.run(both()) == [Verdict(error="judge 'regex': took longer than 1 s"), Verdict(1)]


def test_parts_are_weighted_and_named(processes: JudgeProcesses) -> None:
    parts = {
        "right": {"judge": "last_number"},
        "format": {"judge": "regex", "weight": 0.25, "options": {"pattern": "####", "compare": False}},
    }
    judge = make_judge("weighted", {"parts": parts}, Tools(30, processes))
    assert run(judge, "#### 42") == Verdict(1.25, {"right": 1.0, "format": 0.25})
    assert run(judge, "42") == Verdict(1.0, {"right": 1.0, "format": 0.0})
    error = run(judge, "42", answer="none").error
    assert error is not None
    assert "part 'right': judge 'last_number': ValueError" in error


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex", {}, "pattern: Field required"),
        ("regex", {"pattern": "("}, "is no regular expression"),
        ("math", {"pattern": "x"}, "pattern: Extra inputs"),
        ("exact_match", {"case": True}, "case: Extra inputs"),
        ("http", {"url": "ftp://x"}, "url: String should match"),
        ("weighted", {"parts": {}}, "parts: Dictionary should have at least 1"),
        ("weighted", {"parts": {"a": {"judge": "regex"}}}, "of judge 'regex': pattern: Field required"),
        ("test_judge_kinds.pid_judge", {"x": 1}, "is your own and takes no judge_options"),
    ],
)
def test_options_that_a_judge_does_not_take_are_refused(
    processes: JudgeProcesses, name: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_judge(name, options, Tools(30, processes))


def test_an_isolated_judge_runs_in_another_process(processes: JudgeProcesses) -> None:
    isolated = make_judge("test_judge_kinds.pid_judge", {}, Tools(30, processes, isolate=True))
    inside = make_judge("test_judge_kinds.pid_judge", {}, Tools(30, processes))
    assert run(inside, "").reward == os.getpid()
    assert run(isolated, "").reward not in (os.getpid(), None)
    with pytest.raises(ConfigError, match="is async"):
        make_judge("test_judge_kinds.async_judge", {}, Tools(30, processes, isolate=True))


def test_sb10_an_isolated_judge_that_hangs_or_crashes_costs_its_sample_alone(processes: JudgeProcesses) -> None:
    def isolated(name: str, timeout_s: float) -> Judge:
        return make_judge(f"test_judge_kinds.{name}", {}, Tools(timeout_s, processes, isolate=True))

    async def all_at_once() -> list[Verdict]:
        judges = [isolated("endless_judge", 2), isolated("crashing_judge", 30), *[isolated("pid_judge", 30)] * 6]
        return await asyncio.gather(*(judge.judge(Prompt("?"), sample("")) for judge in judges))

    endless, crashed, *others = asyncio.run(all_at_once())
    assert endless.error == "judge 'test_judge_kinds.endless_judge': took longer than 2 s"
    assert crashed.error == (
        "judge 'test_judge_kinds.crashing_judge': RuntimeError: its process died with exit code -11"
    )
    assert all(other.reward is not None for other in others)


async def longest_lag_s(work: Callable[[], Any]) -> float:
    """How late the event loop was at worst, in seconds, while `work` went on."""
    longest, done = 0.0, asyncio.ensure_future(work())
    while not done.done():
        asked_s = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - asked_s - 0.005)
    return longest


def test_the_event_loop_does_not_wait_for_a_judge_that_burns_the_cpu(processes: JudgeProcesses) -> None:
    """Inside the event loop, the same judge holds it up for as long as it takes."""
    isolated = make_judge("test_judge_kinds.burning_judge", {}, Tools(30, processes, isolate=True))

    async def inline() -> None:
        burning_judge(Prompt("?"), sample("1"))

    async def measure() -> tuple[float, float]:
        await isolated.judge(Prompt("?"), sample("0"))  # the processes have started
        apart_s = await longest_lag_s(lambda: isolated.judge(Prompt("?"), sample("1")))
        return apart_s, await longest_lag_s(inline)

    apart_s, inline_s = asyncio.run(measure())
    print(
        f"\nlongest lag of the event loop: {apart_s * 1e3:.1f} ms with the judge apart, {inline_s * 1e3:.0f} ms inline"
    )
    assert apart_s < inline_s / 2


ORPHANS = """
import asyncio, os, time
from rollq.workers.processes import JudgeProcesses

async def main():
    processes = JudgeProcesses(2)
    await asyncio.gather(*(processes.call(os.getpid, timeout_s=30) for _ in range(4)))
    print("ready", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_processes_end_with_a_worker_that_is_killed(tmp_path: Any) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@asynccontextmanager
async def server(answers: list[web.Response], asked: list[Any]) -> AsyncIterator[str]:
    """A server that gives `answers` in turn, the last one for ever."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        kept = answers[0] if len(answers) == 1 else answers.pop(0)
        return web.Response(status=kept.status, body=kept.body)

    application = web.Application()
    application.router.add_post("/judge", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/judge"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([web.json_response({"reward": 0.5})], Verdict(0.5)),
        ([web.json_response({"reward": {"style": 1, "right": 0.5}})], Verdict(1.5, {"style": 1.0, "right": 0.5})),
        ([web.Response(status=503), web.Response(status=429), web.json_response({"reward": 1})], Verdict(1.0)),
        ([web.Response(status=400, text="no rubric for level 3")], "no rubric for level 3"),
        ([web.Response(status=500, text="sorry")], "failed 4 times, last with HTTP 500: sorry"),
        ([web.Response(text="<html>")], "an answer that is not JSON: b'<html>'"),
        ([web.json_response([1])], "an object with a 'reward' is needed"),
        ([web.json_response({"reward": None})], "a number, or a mapping"),
    ],
)
def test_a_judge_behind_http(processes: JudgeProcesses, answers: list[web.Response], expected: Verdict | str) -> None:
    asked: list[Any] = []

    async def scene() -> Verdict:
        async with server(list(answers), asked) as url:
            options = {"url": url, "retries": 3, "retry_first_s": 0.01}
            judge = make_judge("http", options, Tools(30, processes))
            try:
                return await judge.judge(Prompt("What?", answer="42", metadata={"level": 3}), sample("41"))
            finally:
                await judge.close()

    found = asyncio.run(scene())
    assert asked[0] == {"prompt": "What?", "answer": "42", "metadata": {"level": 3}, "text": "41"}
    if isinstance(expected, Verdict):
        assert found == expected
    else:
        assert found.error is not None
        assert expected in found.error
