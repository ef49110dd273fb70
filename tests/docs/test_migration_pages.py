"""The pages for those who come from XTuner and Trinity-RFT: their settings exist, and a literal translation runs."""

import re
from pathlib import Path

import pytest

from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import Status
from rollq.cli.settings.migration.keys import MODELS, field_at
from rollq_docs import migration
from support.producer_run import TASK, begin, lease, make_run, producer, prompt_file, put, task_settings, train

PAGES = Path(__file__).parents[2] / "docs" / "migration"
SETTING = re.compile(r"`(tasks|evaluations|producer|worker|trainer)\.(?:<name>\.)?([a-z_.]+)")


@pytest.mark.parametrize("page", ["from-xtuner.md", "from-trinity.md"])
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    written = (PAGES / page).read_text("utf-8").partition(migration.TITLE)[0]
    named = {f"{table}.x.{key}" if table in MODELS else f"{table}.{key}" for table, key in SETTING.findall(written)}
    assert len(named) > 5
    assert [key for key in sorted(named) if field_at(key) is None] == []


@pytest.mark.parametrize("path", migration.PAGES, ids=lambda path: path.name)
def test_a_page_lists_every_setting_of_its_system(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text == migration.page(text, migration.PAGES[path]), "run `python -m rollq_docs.migration`"
    assert text.count("\n| `") > 150


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [
        ("sync", {"max_staleness": 0, "tail_batch_trigger_size": -1, "partial_rollout": False, "stragglers": "expire"}),
        ("async", {"max_staleness": 0, "tail_batch_trigger_size": -1, "sync_weights_interval": 1, "order": "arrival"}),
        ("async", {"max_staleness": 0, "max_tries": 3}),  # Trinity: sync_interval 1, sync_offset 0, max_retry_times 2
    ],
)
def test_the_translated_defaults_train_one_batch_after_the_other(
    server_url: str, run_name: str, tmp_path: Path, strategy: str, rules: dict[str, object]
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 40), **rules)
    with (
        make_run(server_url, run_name, task) as buffer,
        producer(server_url, run_name, task, strategy=strategy) as made,
    ):
        held = begin(buffer)
        for step in (1, 2, 3):
            made.tick()
            put(buffer, lease(buffer, 4))
            assert train(buffer, held, step, 4)
            made.tick()
        counts = buffer.counts(TASK)
        assert counts.clock.control is Control.RUN
        assert counts.statuses[Status.EXPIRED] == 0
