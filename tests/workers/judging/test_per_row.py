"""A judge for each row, chosen by a column."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import PromptSettings
from rollq.workers.http.pools import ModelPool, PoolSettings
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.own_answers import OwnAnswers, sample_of
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from rollq.workers.judging.task_judge import make_task_judge, row_reader
from rollq.workers.run import Worker
from support.judge_doubles import sample
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld

TABLE: dict[str, Any] = {
    "field": "info.source",
    "sums": "last_number",
    "code": f"{__name__}.has_def",
    "chat": [
        {"judge": f"{__name__}.is_polite", "weight": 0.2},
        {"judge": "regex", "weight": 0.8, "options": {"pattern": r"is (\d+)"}},
    ],
}
AS_SAMPLE = partial(sample_of, prompt_ids=np.array([7], np.int32), encode=lambda text: list(text.encode()), sampling={})


def has_def(prompt: Prompt, sample: Sample) -> float:
    return float("def" in sample.text)


async def is_polite(prompt: Prompt, sample: Sample) -> float:
    return float("please" in sample.text)


async def asks(prompt: Prompt, sample: Sample, pools: Mapping[str, ModelPool]) -> float:
    return float(len(pools))


def never_right(prompt: Prompt, sample: Sample) -> float:
    raise RuntimeError("no form is right")


def row(source: Any, answer: Any = "42") -> Prompt:
    return Prompt("?", answer=answer, metadata={"info": {"source": source}})


def judged(table: Mapping[str, Any], cases: list[tuple[Prompt, str]], **changes: Any) -> list[Verdict]:
    async def judge_all() -> list[Verdict]:
        processes = JudgePool(1)
        judge = make_task_judge(table, {}, JudgeContext(PATIENCE_S, processes, **changes))
        try:
            return [await judge.judge(prompt, sample(text)) for prompt, text in cases]
        finally:
            await judge.close()
            await processes.close()

    return asyncio.run(judge_all())


def test_each_row_has_its_own_judge() -> None:
    sums, code, chat = judged(TABLE, [(row("sums"), "it is 42"), (row("code"), "42"), (row("chat"), "please: is 42")])
    assert (sums, code) == (Verdict(1.0), Verdict(0.0))
    assert chat == Verdict(1.0, {"is_polite": 0.2, "regex": 0.8})


def test_a_single_judge_has_a_weight_too() -> None:
    table = {"field": "info.source", "sums": {"judge": "last_number", "weight": 0.5}}
    assert judged(table, [(row("sums"), "42")]) == [Verdict(0.5, {"last_number": 0.5})]


def test_values_that_are_no_texts_are_written_as_json() -> None:
    table = {"field": "info.source", "3": "last_number", "true": f"{__name__}.has_def"}
    assert judged(table, [(row(3), "42"), (row(True), "def")]) == [Verdict(1.0), Verdict(1.0)]


def test_a_row_without_a_judge_fails_with_the_judges_that_there_are() -> None:
    unknown, missing = judged(TABLE, [(row("poems"), "42"), (Prompt("?", answer="42"), "42")])
    known = "there are judges for sums, code, chat"
    assert unknown.error == f"judge: info.source = 'poems' has no judge; {known}"
    assert missing.error == f"judge: no column 'info.source' (judge.field), which chooses the judge; {known}"
    assert (unknown.failure, unknown.raised) == (FailureKind.GRADER, False)


def test_judges_of_rows_run_in_processes_and_ask_pools() -> None:
    table = {"field": "info.source", "code": f"{__name__}.has_def"}
    assert judged(table, [(row("code"), "def")], isolate=True) == [Verdict(1.0)]
    pool = ModelPool("grader", PoolSettings(urls=("http://127.0.0.1:1/v1",), served_model="grader"))
    table = {"field": "info.source", "chat": f"{__name__}.asks"}
    assert judged(table, [(row("chat"), "")], pools={"grader": pool}) == [Verdict(1.0)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("rewards_that_are.absent", "judge.sums: judge 'rewards_that_are.absent': cannot import"),
        ({"judge": "regex"}, "judge.sums: options of judge 'regex': pattern: is required, but missing"),
        ([{"judge": "last_number"}, {"judge": "regex"}], "judge.sums: options of judge 'regex': pattern: is required"),
        ({"judge": f"{__name__}.has_def", "options": {"x": 1}}, "is a custom judge and takes no options"),
        (f"{__name__}.asks", "takes pools, but none is set"),
    ],
)
def test_a_judge_that_cannot_be_made_is_named_with_its_value(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judged({"field": "source", "sums": entry}, [])


def test_first_rows_are_judged_by_their_own_judges() -> None:
    table = {**TABLE, "broken": f"{__name__}.never_right"}

    async def look() -> list[str]:
        judge = make_task_judge(table, {}, JudgeContext(PATIENCE_S, JudgePool(1)))
        own = OwnAnswers(judge)
        rows = [*[row("sums")] * 5, row("broken"), row("code"), row("poems")]
        return [await own.problem(prompt, AS_SAMPLE) for prompt in rows]

    *fine, broken, code, poems = asyncio.run(look())
    assert (set(fine), code) == ({""}, "")
    assert "never_right': RuntimeError: no form is right" in broken
    assert poems.startswith("judge: info.source = 'poems' has no judge")


def test_rows_are_read_for_their_own_judges(tmp_path: Path) -> None:
    lines = [("sums", "1,5"), ("code", "1,5"), ("chat", None), ("poems", "x")]
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"".join(orjson.dumps({"prompt": "?", "answer": a, "info": {"source": s}}) + b"\n" for s, a in lines)
    )
    with PromptFile(PromptSettings(prompts=path), row_reader(TABLE, {})) as file:
        assert file.prompt(1).answer == "1,5"
        for number, problem in {
            0: "the answer '1,5' is ambiguous as a number",
            2: "the prompt has no answer",
            3: "info.source = 'poems' has no judge; there are judges for sums, code, chat",
        }.items():
            with pytest.raises(InvalidPrompt, match=rf"p\.jsonl:{number + 1}: {problem}"):
                file.prompt(number)
        before = file.account
    with PromptFile(PromptSettings(prompts=path), row_reader({**TABLE, "poems": "exact_match"}, {})) as file:
        assert file.prompt(3).answer == "x"
        assert file.account != before


def test_a_worker_judges_three_sources(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": TABLE})
    rows = [(row(source), number) for number, source in enumerate(("sums", "code", "chat", "poems"), 1)]
    admitted = buffer.admit("math", rows, epoch=buffer.clock("math").epoch, cursor=0, target=100, step=0)
    assert admitted.count == 4
    world.tickets(4)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: world.count(Status.COMPLETED) == 3 and bool(world.error(4)))

    world.play(scene, answer="please, it is 42", judge_processes=1)
    assert world.error(4) == "judge: info.source = 'poems' has no judge; there are judges for sums, code, chat"
    results = [samples[0] for _, samples in world.results(3)]
    assert [made.status for made in results] == [SampleStatus.COMPLETED] * 3
    assert [made.reward for made in results] == [1.0, 0.0, 1.0]
    assert dict(results[2].reward_parts) == {"is_polite": 0.2, "regex": 0.8}
    assert [made.extra["judge"] for made in results] == ["last_number", "has_def", "weighted"]
