"""The settings that the guide shows are settings that rollq takes."""

import re
import tomllib
from pathlib import Path

import pytest

from rollq.cli.settings.file import load_settings
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import BUILT_IN, make_judge
from rollq.workers.judging.process_pool import JudgePool
from support.documented_commands import ROOT, blocks

SHOWN = [
    (page.stem, block.code)
    for page in sorted((ROOT / "docs" / "guide").glob("*.md"))
    for block in blocks(page)
    if block.language == "toml" and block.mark != "file"
]
TASK = '\n[tasks.math]\nprompts = "math.jsonl"\nbatch_groups = 4\n'
TRAINER = '[trainer]\nmodel = "m"\noutput = "o"\nsteps = 1\n'
VLLM = '[worker]\nengine = "vllm"\noptions = { model = "m" }\n'


@pytest.mark.parametrize(("page", "code"), SHOWN)
def test_settings_in_the_guide_load(page: str, code: str, tmp_path: Path) -> None:
    text = 'run = "r"\n' + code.replace("[trainer]\n", TRAINER) + ("" if "[tasks." in code else TASK)
    if "[trainer." in code and "[trainer]" not in code:
        text += f"\n{TRAINER}"
    if "batch_groups" not in text and "[batch]" not in text:
        text = re.sub(r"^(\[tasks\.\w+\]\n)", r"\1batch_groups = 4\n", text, flags=re.MULTILINE)
    if "guided_json" in text:
        text += VLLM
    path = tmp_path / "rollq.toml"
    path.write_text(text)
    settings = load_settings(path, {})
    if "schedule" in code:
        assert settings.tasks["math"].batch_groups == 48
        assert settings.tasks["math"].schedule == ((100, 72), (200, 48))
        assert settings.tasks["code"].schedule == ((100, 24), (200, 48))


def test_the_judges_of_the_guide_can_be_made() -> None:
    page = (ROOT / "docs" / "guide" / "judges.md").read_text("utf-8")
    shown = tomllib.loads(page.split("```toml")[1].split("```")[0])["tasks"]
    for task in shown.values():
        make_judge(task["judge"], task["judge_options"], JudgeContext(60, JudgePool(1)))
    assert set(BUILT_IN) <= {name.strip('"') for name in re.findall(r'"\w+"', page)}
