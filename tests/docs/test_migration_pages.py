"""The pages for those who come from XTuner and Trinity-RFT: their settings exist, and a literal translation runs."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import Status
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_settings import EvaluationSettings, TaskSettings
from rollq.cli.settings.task_tables import field_of, place_of
from rollq.consumer.settings import TrainerSettings
from rollq.producer.settings import ProducerSettings
from rollq.workers.settings import WorkerSettings
from support.producer_run import TASK, begin, lease, make_run, producer, prompt_file, put, task_settings, train

PAGES = Path(__file__).parents[2] / "docs" / "migration"
TABLES: dict[str, type[BaseModel]] = {
    "tasks": TaskSettings,
    "evaluations": EvaluationSettings,
    "producer": ProducerSettings,
    "worker": WorkerSettings,
    "trainer": TrainerSettings,
}
SETTING = re.compile(r"`(tasks|evaluations|producer|worker|trainer)\.(?:<name>\.)?([a-z_.]+)")


@pytest.mark.parametrize("page", ["from-xtuner.md", "from-trinity.md"])
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    named = set(SETTING.findall((PAGES / page).read_text()))
    assert len(named) > 5
    fields = {(table, key): field_of(*key.rpartition(".")[::2]) if "." in key else key for table, key in named}
    assert {(table, key) for (table, key), field in fields.items() if field not in TABLES[table].model_fields} == set()
    assert {key for (table, key), field in fields.items() if table == "tasks" and place_of(field) != key} == set()
    assert set(TABLES) <= {*RollqSettings.model_fields}


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
