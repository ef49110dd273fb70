"""`rollq settings`: keys and tables by name."""

import pytest
from click.testing import CliRunner

from rollq.cli.main import main
from rollq.cli.settings.reference import engine_reference, reference


def asked(*words: str) -> str:
    result = CliRunner().invoke(main, ["settings", *words])
    return result.output


@pytest.mark.parametrize(
    ("key", "table", "line"),
    [
        ("group_size", "[tasks.NAME]", "group_size  (integer > 0 and <= 1,024; default 8)"),
        ("sampling.top_p", "[tasks.NAME.sampling]", "top_p  (number"),
        ("tasks.math.sampling.top_p", "[tasks.NAME.sampling]", "top_p  (number"),
        ("evaluations.held_out.sampling.top_p", "[tasks.NAME.sampling]", "top_p  (number"),
        ("tasks", "[tasks.NAME]", "prompts  (path; required)"),
        ("trainer.lora", "[trainer.lora]", "rank  (integer"),
        ("name", "[worker]", "name  (text"),
        ("max_batch", "[worker.options], engine transformers", "max_batch  (integer"),
    ],
)
def test_a_key_is_shown_with_its_table_default_and_meaning(key: str, table: str, line: str) -> None:
    shown = asked(key)
    assert table in shown
    assert line in shown


def test_without_a_key_the_advanced_ones_are_left_out() -> None:
    assert "tail_batch_max_tries" not in asked()
    assert "tail_batch_max_tries" in asked("--all")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gorup_size", "did you mean 'group_size'?"),
        ("keep_window", "no longer a setting: the keep rate is measured over 256 groups"),
        ("trainer.wandb.name", "no longer a setting: a tracker's run has the name of rollq's run"),
        ("worker.options.seed", "no longer a setting: the lengths are taken in the same random order"),
        ("worker.repeat_s", "no key or table is called 'worker.repeat_s'"),
        ("zzz", "`rollq settings` shows the keys that most runs set"),
    ],
)
def test_a_key_that_there_is_not_is_an_error_with_a_hint(key: str, hint: str) -> None:
    assert hint in asked(key)


def test_a_table_has_no_key_that_it_calls_removed() -> None:
    for table in [*reference(), *engine_reference()]:
        assert not table.removed.keys() & {setting.key for setting in table.settings}
