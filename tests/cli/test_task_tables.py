"""The tables below a task in `rollq.toml`."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_settings import PROFILES, EvaluationSettings, TaskSettings
from rollq.cli.settings.task_tables import MAIN, REMOVED, SUBTABLES, field_of, place_of

HEAD = 'run = "r"\n[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 4\n'


def loaded(tmp_path: Path, more: str) -> RollqSettings:
    path = tmp_path / "rollq.toml"
    path.write_text(HEAD + more)
    return load_settings(path, {})


def problem(tmp_path: Path, more: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, more)
    return str(refused.value).replace(f"{tmp_path / 'rollq.toml'}:", "").strip()


def test_every_field_of_a_task_has_one_place() -> None:
    places = [field_of(table, key) for table, keys in {"": MAIN, **SUBTABLES}.items() for key in keys]
    assert len(places) == len(set(places))
    assert set(places) == set(TaskSettings.model_fields) - set(REMOVED)
    assert set(EvaluationSettings.model_fields) <= {*places, *REMOVED}


def test_tables_and_dotted_keys_mean_the_same(tmp_path: Path) -> None:
    dotted = loaded(tmp_path, "sampling.top_p = 0.5\ncurriculum.low = 0.2")
    tables = loaded(tmp_path, "[tasks.math.sampling]\ntop_p = 0.5\n[tasks.math.curriculum]\nlow = 0.2")
    assert dotted == tables
    assert (dotted.tasks["math"].top_p, dotted.tasks["math"].curriculum_low) == (0.5, 0.2)


@pytest.mark.parametrize("key", [key for keys in SUBTABLES.values() for key in keys if key not in ("low", "high")])
def test_a_key_at_its_old_place_is_refused_with_the_new_one(tmp_path: Path, key: str) -> None:
    assert f"tasks.math.{key}: write it as {place_of(key)}, or put it" in problem(tmp_path, f"{key} = 1")
    assert f"evaluations.held_out.{key}: write it as {place_of(key)}" in problem(
        tmp_path, f"[evaluations.held_out]\nprompts = 'p'\n{key} = 1"
    )


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_became_a_constant_is_refused_with_the_reason(tmp_path: Path, key: str) -> None:
    assert problem(tmp_path, f"{key} = 1") == f"tasks.math.{key}: no longer a setting: {REMOVED[key]}"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("sampling.tpo_p = 1", "tasks.math.sampling.tpo_p: unknown key; did you mean 'sampling.top_p'?"),
        ("temprature = 1", "tasks.math.temprature: unknown key; did you mean 'temperature'?"),
        ("max_token_stalenes = 1", "unknown key; did you mean 'staleness.max_token_staleness'?"),
        ("sampilng.top_p = 1", "tasks.math.sampilng: unknown key; did you mean 'sampling'?"),
        ("jugding.answer_text = 'last'", "tasks.math.jugding: unknown key; did you mean 'judging'?"),
        ("stalenes.expiry = 'group'", "tasks.math.stalenes: unknown key; did you mean 'staleness'?"),
        ("stalenes = 1", "tasks.math.stalenes: unknown key; did you mean 'staleness'?"),
        ("sampling.stalenes.expiry = 'group'", "sampling.stalenes: unknown key; did you mean 'staleness'?"),
        ("judge_option.digits = 1", "tasks.math.judge_option: unknown key; did you mean 'judge_options'?"),
        ("zzz.top_p = 1", "env_shared, and the tables rows, judging, sampling, staleness, batches, curriculum, limits"),
        ("zzz = 1", "tasks.math.zzz: unknown key; allowed here: prompts, judge,"),
        ("sampling = 3", "tasks.math.sampling = 3: must be a table"),
        ("sampling.temperature = 1.0", "tasks.math.sampling.temperature: belongs directly in [tasks.math]"),
        ("sampling.top_p = 2.0", "tasks.math.sampling.top_p = 2.0: must be less than or equal to 1"),
        ('curriculum.low = "0.1"', "tasks.math.curriculum.low = '0.1': must be a number"),
        ("curriculum.low = 0.9\ncurriculum.high = 0.2", "curriculum.low = 0.9 exceeds curriculum.high = 0.2"),
        ('profile = "fast"', "tasks.math.profile = 'fast': must be 'on-policy', 'one-step-off' or 'throughput'"),
    ],
)
def test_what_is_wrong_is_named_as_the_file_has_it(tmp_path: Path, more: str, expected: str) -> None:
    assert expected in problem(tmp_path, more)


def test_all_misplaced_keys_are_named_at_once(tmp_path: Path) -> None:
    assert problem(tmp_path, "top_p = 0.9\nkeep_window = 3\nlease_s = 3").count("tasks.math.") == 5


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_sets_what_is_not_given(tmp_path: Path, profile: str) -> None:
    task = loaded(tmp_path, f'profile = "{profile}"').tasks["math"]
    assert {key: getattr(task, key) for key in PROFILES[profile]} == dict(PROFILES[profile])
    more = f'profile = "{profile}"\nmax_staleness = 7\nstaleness.stragglers = "wait"'
    given = loaded(tmp_path, more).tasks["math"]
    assert (given.max_staleness, given.stragglers) == (7, "wait")


def test_the_default_profile_is_the_default_of_its_keys(tmp_path: Path) -> None:
    default: Any = TaskSettings.model_fields["profile"].default
    task = loaded(tmp_path, "").tasks["math"]
    assert {key: getattr(task, key) for key in PROFILES[default]} == dict(PROFILES[default])


@pytest.mark.parametrize("profile", ['["on-policy"]', "{ a = 1 }", "3"])
def test_a_profile_that_is_no_text_is_refused(tmp_path: Path, profile: str) -> None:
    assert "tasks.math.profile" in problem(tmp_path, f"profile = {profile}")


def test_a_password_at_the_place_of_a_table_is_not_shown(tmp_path: Path) -> None:
    shown = problem(tmp_path, 'judging = "http://me:sekret@host/v1"')
    assert "must be a table" in shown
    assert "sekret" not in shown


def test_keys_that_a_kind_of_task_cannot_have_are_named_as_the_file_has_them(tmp_path: Path) -> None:
    more = '[evaluations.held_out]\nprompts = "p"\ncurriculum.low = 0.2\nstaleness.expiry = "group"'
    assert "curriculum.low, staleness.expiry: an evaluation is never trained" in problem(tmp_path, more)
