from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.cli.demo.files import HELD_OUT_ROWS, DemoFolder, own_tasks, read_rows, user_task
from rollq.cli.demo.models import SMOLLM2, TINY
from rollq.cli.demo.settings import DemoOptions, demo_toml, held_out_settings
from rollq.cli.settings.file import load_settings


@pytest.fixture
def folder(tmp_path: Path) -> DemoFolder:
    folder = DemoFolder(tmp_path / "demo")
    folder.create()
    return folder


def options(folder: DemoFolder, **changes: object) -> DemoOptions:
    values: dict[str, object] = {
        "out": folder.root,
        "model": TINY,
        "steps": 7,
        "minutes": 1.0,
        "seed": 3,
        "prompts": None,
        "prompt_field": "prompt",
        "answer_field": "answer",
        "max_staleness": 2,
        "strategy": "async",
        "partial_rollout": False,
        "warm_up_steps": 1,
        "workers": 2,
        "live": False,
    }
    return DemoOptions(**{**values, **changes})  # type: ignore[arg-type]


def test_a_folder_that_holds_something_is_not_touched(folder: DemoFolder) -> None:
    with pytest.raises(ConfigError, match=r"is not empty; name a new one with --out"):
        folder.create()


def test_the_settings_of_a_demo_are_valid_and_name_files_of_its_folder(folder: DemoFolder) -> None:
    tasks = own_tasks(folder)
    folder.config.write_text(demo_toml(options(folder), folder, tasks, "redis://127.0.0.1:7777/0"))
    settings = load_settings(folder.config, {})
    assert settings.redis.buffer_url == "redis://127.0.0.1:7777/0"
    assert {name: task.max_staleness for name, task in settings.tasks.items()} == {"sum": 2, "sort": 2}
    assert all(task.prompts.is_relative_to(folder.root) and task.prompts.exists() for task in settings.tasks.values())
    assert settings.producer.strategy == "async"
    assert settings.trainer is not None
    assert settings.trainer.steps == 7
    assert settings.trainer.output == folder.trainer


def test_the_synchronous_counterpart_is_on_policy(folder: DemoFolder) -> None:
    wanted = options(folder, strategy="sync", max_staleness=0)
    folder.config.write_text(demo_toml(wanted, folder, own_tasks(folder), "redis://127.0.0.1:7777/0"))
    settings = load_settings(folder.config, {})
    assert settings.producer.strategy == "sync"
    assert {task.max_staleness for task in settings.tasks.values()} == {0}
    assert settings.trainer is not None


def test_the_fields_of_a_users_prompts_survive_in_the_settings(folder: DemoFolder) -> None:
    question, answer = 'say "hi" \\ é\n', "{answer} # of [1]"
    task = user_task(folder, [b"{}"] * 4, question, answer, seed=1)
    folder.config.write_text(demo_toml(options(folder), folder, [task], "redis://127.0.0.1:7777/0"), "utf-8")
    loaded = load_settings(folder.config, {}).tasks["prompts"]
    assert (loaded.prompt_field, loaded.answer_field, loaded.judge) == (question, answer, "last_number")
    assert held_out_settings(task).prompt_field == question


def test_the_settings_of_smollm2_suit_a_model_that_is_too_large_for_redis(folder: DemoFolder) -> None:
    wanted = options(folder, model=replace(SMOLLM2, uses_gpu=False))
    tasks = own_tasks(folder, SMOLLM2)
    folder.config.write_text(demo_toml(wanted, folder, tasks, "redis://127.0.0.1:7777/0"))
    settings = load_settings(folder.config, {})
    assert settings.trainer is not None
    assert (settings.trainer.transport, settings.trainer.learning_rate) == ("path", 3e-6)
    assert set(settings.tasks) == {"digits"}
    task, held_out = settings.tasks["digits"], held_out_settings(tasks[0])
    assert (task.batch_groups, task.group_size, task.judge) == (4, 8, "last_number")
    assert task.stop == held_out.stop == ("\n",)
    assert (task.temperature, task.max_tokens) == (held_out.temperature, held_out.max_tokens) == (0.5, 8)
    assert task.prompts.exists()
    assert held_out.prompts.exists()
    assert task.prompts != held_out.prompts


def test_a_users_prompts_reach_smollm2_through_its_chat_template(folder: DemoFolder) -> None:
    task = user_task(folder, [b"{}"] * 4, "q", "a", seed=1, model=SMOLLM2)
    wanted = options(folder, model=replace(SMOLLM2, uses_gpu=False))
    folder.config.write_text(demo_toml(wanted, folder, [task], "redis://127.0.0.1:7777/0"))
    assert load_settings(folder.config, {}).tasks["prompts"].chat
    assert held_out_settings(task).chat


def test_a_users_rows_are_split_and_none_is_lost(folder: DemoFolder) -> None:
    rows = [b'{"q": "%d?", "a": "%d"}' % (n, n) for n in range(500)]
    task = user_task(folder, rows, "q", "a", seed=1)
    train, held_out = (path.read_bytes().splitlines() for path in (task.prompts, task.held_out))
    assert len(held_out) == HELD_OUT_ROWS
    assert sorted(train + held_out) == sorted(rows)
    assert (task.prompt_field, task.answer_field) == ("q", "a")


def test_a_prompt_file_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ConfigError, match=r"prompts\.jsonl' cannot be read: No such file"):
        read_rows(path, "prompt", "answer")
    path.write_text('{"prompt": "1+1", "answer": "2"}\n\n')
    with pytest.raises(ConfigError, match="has 1 rows; at least 2"):
        read_rows(path, "prompt", "answer")
    path.write_text('{"question": "1+1", "answer": "2"}\n' * 2)
    with pytest.raises(InvalidPrompt, match=r"none of the first rows .* no field 'prompt'"):
        read_rows(path, "prompt", "answer")
    path.write_text('not JSON\n{"prompt": "1+1", "answer": "2"}\n')
    assert len(read_rows(path, "prompt", "answer")) == 2


def test_a_folder_that_cannot_be_written_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out '.*file/demo': cannot be written: Not a directory"):
        DemoFolder(tmp_path / "file" / "demo").create()
