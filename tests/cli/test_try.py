"""`rollq try`: rows, judges and samples without a server."""

import shutil
import sys
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.cli.main import main

JUDGES = """
def strips(prompt, sample):
    return float(sample.text == prompt.answer.strip())


def parts(prompt, sample):
    return {"right": float(prompt.answer in sample.text), "short": 0.25}


def of_its_own_form(prompt, sample):
    return float(sample.text == f"FINAL: {prompt.answer}")


def place(prompt, samples):
    return [{"place": float(number)} for number, _ in enumerate(samples)]


def no_place(prompt, samples):
    return [1.0]
"""
SETTINGS = """
run = "trying"
[tasks.sums]
prompts = "p.jsonl"
batch_groups = 4
group_size = 4
max_tokens = 4
{more}
[evaluations.held_out]
prompts = "p.jsonl"
judge = "last_number"
[worker]
engine = "simulated"
"""


def tried(folder: Path, *options: str, task: str = "sums", rows: list[object] | None = None, more: str = "") -> Result:
    lines = rows or [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(6)]
    (folder / "p.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (folder / "tried_judges.py").write_text(JUDGES)
    (folder / "rollq.toml").write_text(SETTINGS.format(more=more))
    return CliRunner().invoke(main, ["try", str(folder / "rollq.toml"), task, *options])


@pytest.mark.parametrize("task", ["sums", "held_out"])
def test_rows_with_right_answers_are_fine(tmp_path: Path, task: str) -> None:
    result = tried(tmp_path, task=task)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/p.jsonl:1: 6 tokens\n  | 0 + 1?\n  own answer '1': reward 1" in result.output
    assert "p.jsonl:4" in result.output
    assert "p.jsonl:5" not in result.output
    assert result.output.endswith("nothing is wrong\n")


def test_a_row_without_an_answer_and_a_judge_that_raises_are_problems(tmp_path: Path) -> None:
    result = tried(tmp_path, rows=[{"prompt": "a", "answer": 1}, {"prompt": "b"}], more='judge = "tried_judges.strips"')
    assert result.exit_code == 1
    assert "2 problems:" in result.output
    assert "p.jsonl:2: no field 'answer'" in result.output
    assert "AttributeError: 'int' object has no attribute 'strip' (" in result.output
    assert "tried_judges.py:3 in strips)" in result.output


@pytest.mark.parametrize("table", ["", '[evaluations.mixed]\nprompts = "p.jsonl"\n'], ids=["task", "evaluation"])
def test_each_row_is_tried_with_its_own_judge(tmp_path: Path, table: str) -> None:
    judge = 'judge = { field = "source", sums = "last_number", text = ["tried_judges.strips", "exact_match"] }'
    rows: list[object] = [
        {"prompt": "a", "answer": "so it is 7", "source": "sums"},
        {"prompt": "b", "answer": "words", "source": "text"},
        {"prompt": "c", "answer": "words", "source": "sums"},
        {"prompt": "d", "answer": 1, "source": "code"},
        {"prompt": "e", "answer": "1"},
    ]
    result = tried(tmp_path, "--rows", "5", task="mixed" if table else "sums", rows=rows, more=table + judge)
    assert result.exit_code == 1
    assert "own answer 'so it is 7': reward 1" in result.output
    assert "own answer 'words': reward 2 (strips 1, exact_match 1)" in result.output
    assert "3 problems:" in result.output
    assert "p.jsonl:3: the answer 'words' has no number" in result.output
    assert "p.jsonl:4: source = 'code' has no judge; there are judges for sums, text" in result.output
    assert "p.jsonl:5: no column 'source' (judge.field), which chooses the judge; there are" in result.output


def test_given_answers_are_judged_with_their_parts(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"it is 1"\n"no\\nidea"\n')
    result = tried(tmp_path, "--answers", str(answers), more='judge = "tried_judges.parts"')
    assert result.exit_code == 0, result.output
    assert "answer 'it is 1': reward 1.25 (right 1, short 0.25)" in result.output
    assert "answer 'no\\nidea': reward 0.25 (right 0, short 0.25)" in result.output
    assert "p.jsonl:3" not in result.output
    answers.write_text('"it is 1 \u2028"\n', encoding="utf-8")
    result = tried(tmp_path, "--answers", str(answers), "--rows", "3", more='judge = "tried_judges.parts"')
    assert (result.exit_code, "p.jsonl:2" in result.output) == (0, False)
    answers.write_text("")
    assert "is empty: it needs a line for each row" in tried(tmp_path, "--answers", str(answers)).output
    answers.write_text("1\n")
    result = tried(tmp_path, "--answers", str(answers))
    assert result.exit_code == 2
    assert "answers.jsonl:1 is not a JSON string" in result.output


def test_a_judge_that_expects_another_form_is_a_problem_until_the_form_is_named(tmp_path: Path) -> None:
    judge = 'judge = "tried_judges.of_its_own_form"'
    result = tried(tmp_path, more=judge)
    assert result.exit_code == 1
    assert (
        "gives 0 to the row's own answer, and no less to a wrong text: set judging.answer_text to the form"
        in result.output
    )
    assert tried(tmp_path, more=f'{judge}\njudging.answer_text = "FINAL: {{answer}}"').exit_code == 0


def test_samples_are_shown_and_those_that_teach_nothing_are_a_problem(tmp_path: Path) -> None:
    result = tried(tmp_path, "--sample", "--rows", "2")
    assert result.exit_code == 1
    assert "8 samples of 2 rows" in result.output
    assert "groups with equal rewards, which teach nothing: 2 of 2" in result.output
    assert "8 of 8 samples are truncated: raise max_tokens" in result.output


def test_a_model_in_a_folder_samples(tmp_path: Path, prepared_demo: Path) -> None:
    demo = shutil.copytree(prepared_demo, tmp_path / "demo")
    task = next(line for line in (demo / "rollq.toml").read_text().splitlines() if line.startswith("[tasks."))
    name = task.removeprefix("[tasks.").rstrip("]")
    result = CliRunner().invoke(main, ["try", str(demo / "rollq.toml"), name, "--model", str(demo / "model")])
    assert "reward: " in result.output, result.output
    assert f"{demo}/prompts/" in result.output


def test_a_wrong_name_and_an_offline_task_are_refused(tmp_path: Path) -> None:
    result = tried(tmp_path, task="sum")
    assert (result.exit_code, "the file has held_out, sums" in result.output) == (2, True)


def test_a_prompt_that_is_too_long_is_a_problem(tmp_path: Path) -> None:
    result = tried(tmp_path, more="rows.max_prompt_tokens = 5")
    assert "the prompt has 6 tokens, more than max_prompt_tokens = 5" in result.output
    assert result.exit_code == 1


def test_samples_that_are_judged_together_are_shown_with_their_rewards(tmp_path: Path) -> None:
    together = 'judging.group_judge = "tried_judges.place"'
    result = tried(tmp_path, "--sample", "--rows", "1", more=together)
    assert "own answer" not in result.output
    for number in range(4):
        assert f"sample {number + 1}: reward {number} (place {number}), 4 tokens" in result.output
    assert "reward: 1.500 on average" in result.output
    (tmp_path / "answers.txt").write_text("1")
    refused = tried(tmp_path, "--answers", str(tmp_path / "answers.txt"), more=together)
    assert "--answers: samples of task 'sums' are only judged together" in refused.output


def test_a_group_judge_that_fails_is_one_problem_of_its_row(tmp_path: Path) -> None:
    together = 'judge = "exact_match"\njudging.group_judge = "tried_judges.no_place"'
    result = tried(tmp_path, "--sample", "--rows", "1", more=together)
    assert result.exit_code == 1
    said = "p.jsonl:1: group judge 'tried_judges.no_place': ValueError: returned 1 entries for 4 samples"
    assert result.output.rpartition("problem")[2].count(said) == 1


AGENT = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()
"""


def test_agents_reach_the_model_over_a_gateway(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    command = f"agent_options.command = ['{sys.executable}', '{tmp_path}/agent.py']"
    more = f'agent_loop = "harness"\nagent_options.tool_parser = "hermes"\n{command}'
    result = tried(tmp_path, "--sample", "--rows", "1", more=more)
    assert "4 samples of 1 row" in result.output, result.output
    assert "length: 4 tokens on average" in result.output


def test_programs_elsewhere_cannot_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLQ_GATEWAY_KEY", "key")
    result = tried(tmp_path, "--sample", more='agent_loop = "outside"')
    assert result.exit_code == 2
    assert "its samples come from programs that connect to a worker; leave out --sample" in result.output
