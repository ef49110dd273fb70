"""Built-in judges with options."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollq.buffer.errors import ConfigError
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from support.judge_doubles import made, question, sample, verdicts
from support.pauses import set_pauses
from support.serving import serving

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


def test_math_compares_what_expressions_mean() -> None:
    rewards = {
        ("so it is \\boxed{72}", GSM8K): 1,
        ("#### 72", GSM8K): 1,
        ("The answer is 72.0", GSM8K): 1,
        ("The answer is 71", GSM8K): 0,
        ("", GSM8K): 0,
        ("$\\frac{6}{8}$", "\\frac{3}{4}"): 1,
        ("it is 0.5", "1/2"): 1,
        ("$1 + x$", "x+1"): 1,
        ("$x^2$", "x+1"): 0,
        ("\\boxed{1,234}", "1234"): 1,
        ("it is 1234", 1234): 1,
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$"): 1,
        ("so much text and nothing else", "x+1"): 0,
    }
    found = verdicts("math", {}, list(rewards))
    assert dict(zip(rewards, found, strict=True)) == {case: Verdict(reward) for case, reward in rewards.items()}


def test_a_prompt_without_an_answer_that_can_be_compared_cannot_be_judged() -> None:
    empty, none = verdicts("math", {}, [("42", ""), ("42", None)])
    assert empty.error == "judge 'math': ValueError: the answer '' is empty"
    assert none.error == "judge 'math': ValueError: the prompt has no answer"
    for name, options in (("exact_match", {}), ("last_number", {}), ("regex", {"pattern": ".+"})):
        (none,) = verdicts(name, options, [("None", None)])
        assert none.error == f"judge '{name}': ValueError: the prompt has no answer"


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        (
            {"pattern": r"answer: (\S+)"},
            {
                ("answer: 41, no, answer: 42", "42"): 1,
                ("answer: 42, no, answer: 41", "42"): 0,
                ("answer: 42.0", 42): 1,
                ("answer: 1,234", " 1234 "): 1,
                ("answer: -3", "3"): 0,
                ("answer: Paris", "Paris"): 1,
                ("answer: 42nd", "42"): 0,
                ("answer: 9007199254740993", "9007199254740992"): 0,
            },
        ),
        (
            {"pattern": r"#### (-?[0-9.,]+)"},  # GSM8K's own
            {
                ("first #### 1, then #### 72", "72"): 1,
                ("#### 1,234", "1234"): 1,
                ("#### 71", "72"): 0,
                ("it is 72", "72"): 0,
            },
        ),
        ({"pattern": r"no (\S+)|answer"}, {("no 42", "42"): 1, ("answer", "None"): 0}),
        ({"pattern": r"\d+"}, {("it is 42 ", "42"): 1, ("no idea", "42"): 0}),
        (
            {"pattern": r"^<think>.*</think>", "compare": False},
            {("<think>so</think> 7", None): 1, ("7", None): 0},
        ),
    ],
)
def test_regex_takes_what_it_finds_last(options: dict[str, Any], rewards: dict[tuple[str, Any], float]) -> None:
    found = verdicts("regex", options, list(rewards))
    assert dict(zip(rewards, found, strict=True)) == {case: Verdict(reward) for case, reward in rewards.items()}


def test_parts_are_weighted_and_named() -> None:
    parts = {
        "right": {"judge": "last_number"},
        "format": {"judge": "regex", "weight": 0.25, "options": {"pattern": "####", "compare": False}},
        "apart": {"judge": "support.judge_doubles.two_parts", "weight": -1},
    }
    both, right, broken = verdicts("weighted", {"parts": parts}, [("#### 42", "42"), ("42", "42"), ("42", "none")])
    assert both == Verdict(0.75, {"right": 1.0, "format": 0.25, "apart/one": -1.0, "apart/other": 0.5})
    assert right == Verdict(0.5, {"right": 1.0, "format": 0.0, "apart/one": -1.0, "apart/other": 0.5})
    assert broken.error is not None
    assert "part 'right': judge 'last_number': ValueError" in broken.error


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex", {}, "pattern: is required, but missing"),
        ("regex", {"pattern": "("}, "is not a regular expression"),
        ("math", {"pattern": "x"}, "pattern: unknown key; allowed here: none"),
        ("exact_match", {"case": True}, "case: unknown key; allowed here: none"),
        ("http", {"url": "ftp://x"}, "url = 'ftp://x': must be a URL that begins with http:// or https://"),
        ("weighted", {"parts": {}}, "parts: must have at least 1 item"),
        ("weighted", {"parts": {"a": {"judge": "regex"}}}, "of judge 'regex': pattern: is required, but missing"),
        ("support.judge_doubles.pid_judge", {"x": 1}, "is a custom judge and takes no judge_options"),
    ],
)
def test_options_that_a_judge_does_not_take_are_refused(name: str, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_judge(name, options, JudgeContext(30, JudgePool(1)))


@asynccontextmanager
async def server(answers: list[web.Response], asked: list[Any]) -> AsyncIterator[str]:
    """A server that gives `answers` in turn, the last one again and again."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        kept = answers[0] if len(answers) == 1 else answers.pop(0)
        return web.Response(status=kept.status, body=kept.body)

    application = web.Application()
    application.router.add_post("/judge", answer)
    async with serving(application) as url:
        yield f"{url}/judge"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([web.json_response({"reward": 0.5})], Verdict(0.5)),
        ([web.json_response({"reward": {"style": 1, "right": 0.5}})], Verdict(1.5, {"style": 1.0, "right": 0.5})),
        ([web.Response(status=503), web.Response(status=429), web.json_response({"reward": 1})], Verdict(1.0)),
        ([web.Response(status=400, text="no rubric for level 3")], "no rubric for level 3"),
        ([web.Response(status=500, text="sorry")], "failed 4 times; last error: HTTP 500: sorry"),
        ([web.Response(text="<html>")], "the answer is not JSON: b'<html>'"),
        ([web.json_response([1])], "expected an object with a 'reward'"),
        ([web.json_response({"reward": None})], "a number, or a mapping"),
    ],
)
def test_a_judge_behind_http(
    answers: list[web.Response], expected: Verdict | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pauses(monkeypatch, first_s=0.01, longest_s=10)
    asked: list[Any] = []

    async def scene() -> Verdict:
        async with server(list(answers), asked) as url:
            options = {"url": url, "retries": 3}
            async with made("http", options) as judge:
                return await judge.judge(question(), sample("41"))

    found = asyncio.run(scene())
    assert asked[0] == {"prompt": "What is it?", "answer": "42", "metadata": {"level": 3}, "text": "41"}
    if isinstance(expected, Verdict):
        assert found == expected
    else:
        assert found.error is not None
        assert expected in found.error
