"""docs/guide/judges.md: its own judges judge."""

import asyncio
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus
from rollq.workers.http.pools import ModelPool, PoolSettings
from rollq.workers.judging.group_judge import GroupNotJudged, make_group_judge
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from support.consumer_groups import make_segment
from support.documented_commands import ROOT, blocks
from support.judge_doubles import verdicts
from support.serving import serving

FILES = {block.detail: block.code for block in blocks(ROOT / "docs" / "guide" / "judges.md") if block.mark == "file"}
SAMPLE = Sample(segments=(), status=SampleStatus.COMPLETED, text="It is 42.")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, where Python finds them."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "judges")
    yield tmp_path
    for module in ("rewards", "grading", "steps", "ranking", "ruler"):
        sys.modules.pop(module, None)


@asynccontextmanager
async def grader(
    settings: str, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[JudgeContext]:
    """What judges get when the pool `grader` of a file of the page is a server that answers so."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    shown = tomllib.loads(FILES[settings])["worker"]["pools"]["grader"]
    async with serving(application) as url:
        pool = ModelPool("grader", PoolSettings(**{**shown, "urls": [f"{url}/v1"]}))
        try:
            yield JudgeContext(60, JudgePool(1), pools={"grader": pool})
        finally:
            await pool.close()


@pytest.mark.parametrize("isolate", [False, True])
def test_the_reward_of_the_page_is_made_of_its_parts(isolate: bool) -> None:
    async def scene() -> Verdict:
        processes = JudgePool(1)
        try:
            judge = make_judge("rewards.reward", {}, JudgeContext(60, processes, isolate))
            return await judge.judge(Prompt("?", answer=42), SAMPLE)
        finally:
            await processes.close()

    verdict = asyncio.run(scene())
    assert verdict.parts == {"right": 1.0, "short": -0.0009}


def test_the_credit_of_the_page_is_that_of_each_turn() -> None:
    said = ["Let me check.", "No.", "Let me check: 42"]
    messages = [{"role": role, "content": text} for text in said for role in ("assistant", "user")]
    turns = tuple([make_segment([1], [2, 3]) for _ in said])
    sample = replace(SAMPLE, segments=turns, extra={"messages": messages})

    async def scene() -> Verdict:
        judge = make_judge("steps.score", {}, JudgeContext(60, JudgePool(1)))
        return await judge.judge(Prompt("?", answer=42), sample)

    verdict = asyncio.run(scene())
    assert verdict.token_rewards is not None
    assert verdict.token_rewards.tolist() == pytest.approx([0, 0.1, 0, 0, 0, 1.1])
    assert verdict.reward == pytest.approx(1.2)


def test_the_grading_of_the_page_asks_its_pool() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": "Short, but 3 facts. 7"}}]})

    async def scene() -> Verdict:
        async with grader("pools.toml", answer) as context:
            return await make_judge("grading.grade", {}, context).judge(Prompt("Write."), SAMPLE)

    assert asyncio.run(scene()) == Verdict(0.7)
    assert asked[0]["model"] == "grader"
    assert asked[0]["messages"][0]["content"].endswith("It is 42.")


def test_the_ranking_of_the_page_compares_all_pairs_whatever_their_order() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        """Longer is better, and the first of equals."""
        question = (await request.json())["messages"][0]["content"]
        one, other = re.findall(r"Answer \d: (.*)", question)
        asked.append(question)
        return web.json_response({"choices": [{"message": {"content": f"So: {1 + (len(other) > len(one))}"}}]})

    async def scene() -> None:
        async with grader("ranked.toml", answer) as context:
            judge = make_group_judge("ranking.rank", context)
            for texts in permutations(["a", "bbb", "cc", "dd"]):
                samples = [replace(SAMPLE, text=text) for text in texts]
                verdicts = await judge.verdicts(Prompt("Write."), samples)
                rewards = {text: verdict.reward for text, verdict in zip(texts, verdicts, strict=True)}
                assert rewards == {"a": 0.0, "bbb": 1.0, "cc": 0.5, "dd": 0.5}
            assert [verdict.reward for verdict in await judge.verdicts(Prompt("Write."), [SAMPLE])] == [0.0]

    asyncio.run(scene())
    assert len(asked) == 24 * 12


@pytest.mark.parametrize("scores", ["0.5, 1, 0.25", "0.5, 1", "0.5, 1, 2"])
def test_the_ruler_of_the_page_scores_a_group_in_one_call(scores: str) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"][0]["content"])
        return web.json_response({"choices": [{"message": {"content": f"The second is best.\n{scores}"}}]})

    async def scene() -> list[Verdict]:
        async with grader("ranked.toml", answer) as context:
            samples = [replace(SAMPLE, text=text) for text in ("good", "better", "bad")]
            return await make_group_judge("ruler.score", context).verdicts(Prompt("Write."), samples)

    if scores == "0.5, 1, 0.25":
        assert [verdict.reward for verdict in asyncio.run(scene())] == [0.5, 1.0, 0.25]
    else:
        with pytest.raises(GroupNotJudged, match="3 scores from 0 to 1 were asked for; the model ended with"):
            asyncio.run(scene())
    assert len(asked) == 1
    assert "Answer 2: better" in asked[0]


def test_what_the_page_says_is_equal_is() -> None:
    page = (ROOT / "docs" / "guide" / "judges.md").read_text()
    table = page.partition("| judge | the row's answer |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, pattern `(.+?)`)? \| `(.+?)` \| `(.+?)` \| (\d) \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n") - 1
    wrong = []
    for name, pattern, answer, text, reward in rows:
        options = {"pattern": pattern} if pattern else {}
        [verdict] = verdicts(name, options, [(text, exact_json.loads_as_written(answer))])
        if verdict.reward != float(reward):
            wrong.append((name, answer, text, verdict))
    assert {name for name, *_ in rows} == {"exact_match", "last_number", "math", "regex"}
    assert wrong == []
