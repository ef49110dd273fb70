"""Judges: rewards, and samples left without one."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Segment, VersionSpan
from rollq.workers.judging.builtin import exact_match, last_number
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.judges import BUILT_IN, answer_reader, make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Credit, Verdict
from rollq.workers.user_code.calls import MAX_THREADS
from support.waiting import PATIENCE_S

SEGMENT = Segment(
    np.array([1], np.int32), np.array([2], np.int32), np.array([-0.5], np.float32), (VersionSpan(1, 0, 1),)
)
release = threading.Event()


def sample(text: str) -> Sample:
    return Sample(segments=(SEGMENT,), status=SampleStatus.COMPLETED, text=text)


def judge_named(name: str, timeout_s: float) -> Judge:
    return make_judge(name, {}, JudgeContext(timeout_s, JudgePool(1)))


def verdict(name: str, text: str = "42", answer: Any = "42", timeout_s: float = PATIENCE_S) -> Verdict:
    return asyncio.run(judge_named(name, timeout_s).judge(Prompt("?", answer=answer), sample(text)))


def length_judge(prompt: Prompt, judged: Sample) -> float:
    return float(len(judged.text))


async def parts_judge(prompt: Prompt, judged: Sample) -> Mapping[str, float]:
    await asyncio.sleep(0)
    return {"right": 1.0, "short": 0.5}


def nan_judge(prompt: Prompt, judged: Sample) -> float:
    return float("nan")


def huge_judge(prompt: Prompt, judged: Sample) -> float:
    return 1e308


def nan_part_judge(prompt: Prompt, judged: Sample) -> Mapping[str, float]:
    return {"right": 1.0, "style": float("inf")}


def silent_judge(prompt: Prompt, judged: Sample) -> None:
    return None


def raising_judge(prompt: Prompt, judged: Sample) -> float:
    raise KeyError("no such rubric")


def exiting_judge(prompt: Prompt, judged: Sample) -> float:
    raise SystemExit(3)


def leaving() -> Iterator[float]:
    yield 1.0
    raise SystemExit(6)


def lazily_leaving_judge(prompt: Prompt, judged: Sample) -> Credit:
    return Credit(tokens=leaving())


async def leaving_judge(prompt: Prompt, judged: Sample) -> float:
    raise SystemExit(4)


async def cancelled_judge(prompt: Prompt, judged: Sample) -> float:
    lost = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
    lost.cancel()
    await lost
    return 1.0


hanging_in: list[threading.Thread] = []


def hanging_judge(prompt: Prompt, judged: Sample) -> float:
    hanging_in.append(threading.current_thread())
    release.wait(PATIENCE_S)
    return 1.0


async def slow_judge(prompt: Prompt, judged: Sample) -> float:
    await asyncio.sleep(PATIENCE_S)
    return 1.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"), [("42", "42", 1), (" 42\n", "42", 1), ("42", 42, 1), ("421", "42", 0), ("", "42", 0)]
)
def test_exact_match_leaves_out_spaces_around_both(text: str, answer: Any, reward: float) -> None:
    assert exact_match(Prompt("?", answer=answer), sample(text)) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 42.", "6*7\n#### 42", 1),
        ("first 41, then 42", "#### 42", 1),
        ("42, no: 41", "#### 42", 0),
        ("it costs $1,234.50", "#### 1234.5", 1),
        ("-3", "-3", 1),
        ("no idea", "#### 42", 0),
    ],
)
def test_last_number_compares_the_last_numbers(text: str, answer: str, reward: float) -> None:
    assert last_number(Prompt("?", answer=answer), sample(text)) == reward


def test_an_answer_without_a_number_cannot_be_judged() -> None:
    assert verdict("last_number", answer="none").error == (
        "judge 'last_number': ValueError: the answer 'none' has no number"
    )


def test_a_judge_of_ones_own_may_be_blocking_or_async_and_may_name_parts() -> None:
    assert verdict(f"{__name__}.length_judge", "four") == Verdict(4.0)
    assert verdict(f"{__name__}.parts_judge") == Verdict(1.5, {"right": 1.0, "short": 0.5})


@pytest.mark.parametrize("isolate", [False, True])
def test_only_what_a_judge_raises_may_count_as_a_wrong_answer(isolate: bool) -> None:
    async def found(name: str) -> Verdict:
        processes = JudgePool(1)
        try:
            judge = make_judge(f"{__name__}.{name}", {}, JudgeContext(PATIENCE_S, processes, isolate))
            return await judge.judge(Prompt("?"), sample("42"))
        finally:
            await processes.close()

    assert asyncio.run(found("raising_judge")).raised
    assert asyncio.run(found("exiting_judge")).raised
    for name in ("nan_judge", "huge_judge", "nan_part_judge", "silent_judge"):
        verdict = asyncio.run(found(name))
        assert verdict.error
        assert not verdict.raised


def test_a_sum_of_judges_knows_whether_its_part_raised() -> None:
    def found(name: str) -> Verdict:
        options = {"parts": {"own": {"judge": f"{__name__}.{name}"}}}
        judge = make_judge("weighted", options, JudgeContext(PATIENCE_S, JudgePool(1)))
        return asyncio.run(judge.judge(Prompt("?"), sample("42")))

    assert found("raising_judge").raised
    assert not found("nan_judge").raised


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan_judge", "returned nan; expected a finite number"),
        ("huge_judge", "returned 1e+308; expected a finite number of 32 bits"),
        ("nan_part_judge", "whose entry 'style' is not a finite number"),
        ("silent_judge", "returned None"),
        ("raising_judge", "KeyError: 'no such rubric'"),
        ("exiting_judge", "SystemExit(3) (tests/workers/judging/test_judges.py:69 in exiting_judge)"),
        ("leaving_judge", "SystemExit(4) (tests/workers/judging/test_judges.py:82 in leaving_judge)"),
        ("lazily_leaving_judge", "SystemExit(6)"),
        ("cancelled_judge", "RuntimeError: it was cancelled from within"),
    ],
)
def test_a_judge_without_a_usable_answer_leaves_an_error_and_no_reward(name: str, message: str) -> None:
    found = verdict(f"{__name__}.{name}")
    assert found.reward is None
    assert found.error is not None
    assert message in found.error


def text_judge(text: str) -> float:
    return float(len(text))


@pytest.mark.parametrize("isolate", [False, True])
def test_a_judge_that_cannot_be_called_with_prompt_and_sample_is_refused(isolate: bool) -> None:
    with pytest.raises(
        ConfigError,
        match=rf'judge = "{__name__}.text_judge": def text_judge\(text\) has the wrong parameters \(too many',
    ):
        make_judge(f"{__name__}.text_judge", {}, JudgeContext(1.0, JudgePool(1), isolate))


@pytest.mark.parametrize("name", ["hanging_judge", "slow_judge"])
def test_a_judge_that_takes_too_long_is_left_behind(name: str) -> None:
    release.clear()
    found = verdict(f"{__name__}.{name}", timeout_s=0.1)
    release.set()
    assert found == Verdict(error=f"judge '{__name__}.{name}': took longer than 0.1 s", raised=True)


def test_sb10_a_judge_that_hangs_holds_up_no_other_and_takes_a_bounded_number_of_threads() -> None:
    release.clear()
    hanging_in.clear()

    async def scene() -> list[Verdict]:
        hanging = judge_named(f"{__name__}.hanging_judge", 0.2)
        other = judge_named(f"{__name__}.length_judge", PATIENCE_S)
        stuck = [asyncio.create_task(hanging.judge(Prompt("?"), sample("x"))) for _ in range(2 * MAX_THREADS)]
        while len(hanging_in) < MAX_THREADS:
            await asyncio.sleep(0.005)
        assert await other.judge(Prompt("?"), sample("xy")) == Verdict(2.0)
        found = await asyncio.gather(*stuck)
        assert len(set(hanging_in)) == len(hanging_in) == MAX_THREADS
        return found

    found = asyncio.run(scene())
    release.set()
    assert all(one.error is not None for one in found)


serving: list[threading.Thread] = []


def remembering_judge(prompt: Prompt, sample: Sample) -> float:
    serving.append(threading.current_thread())
    return 1.0


def test_a_thread_whose_call_has_ended_serves_the_next() -> None:
    serving.clear()

    async def scene() -> None:
        judge = judge_named(f"{__name__}.remembering_judge", PATIENCE_S)
        for _ in range(20):
            await judge.judge(Prompt("?"), sample("x"))
            await asyncio.sleep(0.005)

    asyncio.run(scene())
    assert len(serving) == 20
    assert len({id(thread) for thread in serving}) < 20


def test_judges_that_do_not_exist_are_configuration_errors() -> None:
    for name, message in {
        "exactmatch": "use environment, exact_match, http, last_number, math, none, regex, weighted, or a dotted path",
        "no_such_module.judge": "cannot import 'no_such_module'",
        f"{__name__}.no_such": "has no 'no_such'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            judge_named(name, 1)


def test_a_failure_is_logged_once_and_kept_with_every_sample(caplog: pytest.LogCaptureFixture) -> None:
    judge = judge_named(f"{__name__}.nan_judge", PATIENCE_S)
    errors = {asyncio.run(judge.judge(Prompt("?"), sample("42"))).error for _ in range(3)}
    assert len(errors) == 1
    assert errors != {None}
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_judges_that_compare_say_that_they_need_an_answer() -> None:
    options: dict[str, dict[str, Any]] = {
        "regex": {"pattern": "x"},
        "http": {"url": "http://judge"},
        "weighted": {"parts": {"format": {"judge": "regex", "options": {"pattern": "x", "compare": False}}}},
    }
    comparing = {name for name in BUILT_IN if answer_reader(name, options.get(name, {}))}
    assert comparing == {"exact_match", "last_number", "math", "regex"}
    assert answer_reader("weighted", {"parts": {"right": {"judge": "math"}}})
    assert not answer_reader("my_package.judges.strict", {})
