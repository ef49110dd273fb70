"""docs/guide/prompts.md: its settings load, and its order works."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from rollq.buffer.calls.replies.prompts import PromptStats
from rollq.buffer.rules.settings import TaskRules
from rollq.cli.settings.task_settings import TaskSettings
from rollq.cli.settings.task_tables import flattened, place_of
from rollq.producer.columns import Columns
from rollq.producer.prompt_order import make_order
from rollq.producer.settings import ProducerTask
from support.documented_commands import ROOT, blocks
from support.no_numbers import no_numbers

PAGE = ROOT / "docs" / "guide" / "prompts.md"
BLOCKS = blocks(PAGE)

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_the_mapping_fits_the_data_that_it_is_for() -> None:
    (settings,) = [block.code for block in BLOCKS if block.language == "toml"]
    data, problems = flattened(tomllib.loads(settings))
    assert problems == []
    (task, *_) = data["tasks"].values()
    prompt = Columns.from_task(TaskSettings(batch_groups=1, **task)).prompt(VERL)[0]
    assert prompt.content[-1] == {"role": "user", "content": "2+2?"}
    assert prompt.answer == "4"


def test_the_order_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in BLOCKS if block.mark == "file"]
    (tmp_path / block.detail).write_text(block.code)
    monkeypatch.syspath_prepend(tmp_path)
    order = make_order(
        TaskSettings(prompts=Path("p"), batch_groups=1, max_tokens=100, prompt_order="orders.ShortOnly"), no_numbers
    )
    assert np.array_equal(order.pass_order(3, (1, 2), 0), [0, 1, 2])
    known = PromptStats(tries=1, samples=8, pass_rate=0.5, mean_reward=0.5, mean_tokens=60.0)
    assert [order.takes(0, 0, None), order.takes(0, 0, known), order.takes(0, 0, known._replace(mean_tokens=40.0))] == [
        True,
        False,
        True,
    ]


def test_the_page_names_every_setting_of_prompts() -> None:
    text = PAGE.read_text("utf-8")
    others = {*TaskRules.model_fields, "min_keep_rate", "stop_after_failures", "should_continue"}
    fields = ProducerTask.model_fields.keys() - others
    keys = [place_of(name).rpartition(".")[2] for name in fields]
    assert [key for key in keys if f"`{key}" not in text and f"<name>.{key}`" not in text] == []
