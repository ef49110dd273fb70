"""Options of chat templates, and files with other ones, in `rollq.toml`."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.cli.main import main
from rollq.cli.run_location import templates
from rollq.cli.settings.file import load_settings
from rollq.cli.up.roles import check_roles
from support.chat_families import BUILT_IN, family_tokenizer

SETTINGS = """
run = "thinking"
[tasks.sums]
prompts = "p.jsonl"
judge = "last_number"
batch_groups = 4
group_size = 4
rows.chat = true
{options}
[evaluations.held_out]
prompts = "p.jsonl"
judge = "last_number"
rows.chat = true
[worker]
engine = "simulated"
tokenizer = "model"
{worker}
"""
OFF = "rows.template_options = { enable_thinking = false }"
CLOSED = "<think>\n\n</think>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with prompts, and with a tokenizer that has the chat template of Qwen3."""
    (tmp_path / "p.jsonl").write_bytes(orjson.dumps({"prompt": "1 + 1?", "answer": "2"}) + b"\n")
    family_tokenizer(tmp_path / "model", BUILT_IN["Qwen3"])
    return tmp_path


def written(folder: Path, options: str = "", worker: str = "") -> Path:
    file = folder / "rollq.toml"
    file.write_text(SETTINGS.format(options=options, worker=worker))
    return file


def test_the_prompts_of_a_task_are_shown_as_its_workers_render_them(folder: Path) -> None:
    shown = [
        CliRunner().invoke(main, ["try", str(written(folder, options)), task])
        for options, task in (("", "sums"), (OFF, "sums"), (OFF, "held_out"))
    ]
    assert [result.exit_code for result in shown] == [0, 0, 0], shown[1].output
    assert ["</think>" in result.output for result in shown] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "worker", "problem"),
    [
        ("rows.template_options.enable_thinkin = false", "", r"tasks\.sums: rows\.template_options\.enable_thinkin: "),
        ("", 'chat_template = "broken.jinja"', r"worker\.chat_template: .*broken\.jinja:2: "),
        ("", 'chat_template = "none.jinja"', r"worker\.chat_template: cannot read '.*/none\.jinja'"),
    ],
)
def test_a_broken_setting_is_refused_before_anything_starts(
    folder: Path, options: str, worker: str, problem: str
) -> None:
    (folder / "broken.jinja").write_text("{{ messages }}\n{% if %}")
    file = written(folder, options, worker)
    with pytest.raises(ConfigError, match=problem):
        check_roles(load_settings(file), file)
    assert CliRunner().invoke(main, ["try", str(file), "sums"]).exit_code == 2


def test_a_file_is_found_beside_the_settings(folder: Path) -> None:
    (folder / "short.jinja").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    result = CliRunner().invoke(main, ["try", str(written(folder, worker='chat_template = "short.jinja"')), "sums"])
    assert "<1 + 1?>" in result.output, result.output


def test_workers_of_a_run_have_the_same_templates(folder: Path, buffer: Buffer) -> None:
    (folder / "short.jinja").write_text("{{ messages[0].content }}")
    known = templates(load_settings(written(folder)))
    assert set(known) == {"chat template of tasks.sums", "chat template of evaluations.held_out"}
    buffer.create_run(identities=known)
    buffer.create_run(identities=known)
    buffer.create_run()  # a producer
    for options, worker, table in (
        (OFF, "", r"tasks\.sums"),
        ("", 'chat_template = "short.jinja"', r"evaluations\.held_out"),
    ):
        with pytest.raises(RunMismatch, match=rf"chat template of {table} .*, this role has .*give the run another"):
            buffer.create_run(identities=templates(load_settings(written(folder, options, worker))))


def test_a_rows_tools_are_shown_in_single_turns_alone(folder: Path) -> None:
    tool = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object", "properties": {}}}}
    row = {"prompt": "1 + 1?", "answer": "2", "functions": [tool]}
    (folder / "p.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    column = 'rows.tools_field = "functions"'
    for options in (column, column + '\nrows.reply_prefix = "It is"'):
        result = CliRunner().invoke(main, ["try", str(written(folder, options)), "sums"])
        assert '"name": "add_up"' in result.output, result.output
    with pytest.raises(ConfigError, match=r'rows\.tools_field: is for agent_loop = "single_turn", and "tools" gives'):
        load_settings(written(folder, column + '\nagent_loop = "tools"'))


def test_the_reply_starts_with_a_prefix_in_single_turns_alone(folder: Path) -> None:
    prefix = 'rows.reply_prefix = "It is"'
    result = CliRunner().invoke(main, ["try", str(written(folder, prefix)), "sums"])
    assert "| It is\n" in result.output, result.output  # and nothing after it
    with pytest.raises(
        ConfigError, match=r'rows\.reply_prefix: starts the one reply of agent_loop = "single_turn", and "tools"'
    ):
        load_settings(written(folder, prefix + '\nagent_loop = "tools"'))
