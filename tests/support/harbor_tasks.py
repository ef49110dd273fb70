"""Tasks in Harbor's layout in tests, and their reward for what a script leaves."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollq.buffer.values.failures import SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.environments.harbor import judge as harbor_judge
from rollq.environments.harbor.kind import Harbor, TaskFolder
from rollq.workers.gateway.harnesses.process import sessions_folder
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.process_pool import JudgePool
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import run

TEST = """
cd /app
if [ "$(cat greeting)" = "$(cat /tests/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def add_task(folder: Path, name: str = "hello", *, test: str = TEST, settings: str = "", solution: str = "") -> Path:
    """A task that wants the file `greeting` to say what its tests expect."""
    files = {
        "instruction.md": f"Write a greeting to /app/greeting: {name}",
        "task.toml": settings or "[verifier]\ntimeout_sec = 120.0",
        "environment/draft": "Hullo",
        "tests/test.sh": test,
        "tests/expected": "the secret greeting",
        "solution/solve.sh": solution or "echo the secret greeting > /app/greeting",
    }
    for path, text in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    return folder / name


def source(folder: Path, split: str = "train", **options: Any) -> TaskFolder:
    return Harbor().open(str(folder), options, split)


def judged(made: TaskFolder, script: str, tmp_path: Path, **options: Any) -> Any:
    """The judge's answer on what a shell script leaves in the workspace of the first row, or why the sample failed; no
    session is left."""
    settings, (row, *_) = made.settings(), made.rows()
    metadata = {name: value for name, value in row.items() if name != "prompt"}
    prompt = Prompt(row["prompt"], metadata=metadata)
    options = {"command": ["bash", "-c", script], **settings["agent_options"], "tool_parser": "", **options}
    ends: list[Callable[[], object]] = []

    async def work() -> Any:
        loop = make_loop(settings["agent_loop"], options)
        context = JudgeContext(60, JudgePool(1))
        judge = harbor_judge.JUDGE(harbor_judge.TestsOptions(**settings["judge_options"]), context)
        model = Model(chat_tokenizer(tmp_path / "model"), [])
        given = replace(rollout(model, prompt), session=f"harbor{os.getpid()}/1/0/1", at_end=ends.append)
        sample: Sample = await loop.run(given)
        try:
            return await judge.call(prompt, sample)
        except SampleFailed as error:
            return error

    result = run(work)
    for end in ends:
        end()
    assert not (sessions_folder() / f"harbor{os.getpid()}-1-0").exists()
    return result
