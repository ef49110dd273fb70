"""`rollq groups query`, from the shell's words to what is shown."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.query.language import FIELDS
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Sample, SampleStatus, Status
from rollq.buffer.wire.sample_outcomes import SampleOutcome
from rollq.cli.main import main
from rollq.monitor.groups.query_table import Answer, as_lines, as_table
from support.buffer_run import World

Ask = Callable[..., Result]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["groups", "query", *words])


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> Ask:
    """Asks about a run with two completed groups, a failed one and a pending one."""
    world = World(buffer).start(math={}, code={})
    world.complete(2, "math")
    world.admit(2, "math")
    broken = Sample(
        segments=(),
        status=SampleStatus.FAILED,
        failure=FailureKind.GRADER,
        error="judge:\nno number in the answer " + 9 * "and so on ",
    )
    buffer.put([GroupResult(world.lease(1, "math")[0], (broken, broken))])
    return lambda *words: run(*words, "--url", server_url, "--run", run_name)


def test_xb15_the_answer_is_a_table(ask: Ask) -> None:
    found = ask('{"status": "completed", "staleness": {"$lte": 0}}')
    assert found.exit_code == 0
    assert found.output.splitlines() == [
        "task  uid  status     step  staleness  reward  tokens  tries",
        "math    1  completed     -          0   1.000       3      1",
        "math    2  completed     -          0   1.000       3      1",
    ]
    assert ask('{"status": "aborted"}').output == "no groups\n"


def test_errors_stand_at_the_end_of_the_row_cut_to_a_terminal_of_100_columns(ask: Ask) -> None:
    header, row = ask('{"status": "failed"}').output.splitlines()
    assert header == "task  uid  status  step  staleness  reward  tokens  tries  error"
    assert row.startswith("math    3  failed     -          0       -       0      1  judge: no number in the answer")
    assert row.endswith("...")
    assert len(row) <= 100
    (line,) = ask('{"status": "failed"}', "--json").output.splitlines()
    assert orjson.loads(line)["error"].startswith(
        "judge:\nno number in the answer and so on and so on and so on and so on"
    )


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    records = [
        Answer(GroupRecord(7, "a-long-name-of-a-task", "completed", 12, 7, -1.25, 1)),
        Answer(GroupRecord(1234567890, "b", "failed", 0, 1234567890, None, 3, "an error")),
    ]
    assert as_table(records, more=True).splitlines() == [
        "task                          uid  status     step  staleness  reward  tokens  tries  error",
        "a-long-name-of-a-task           7  completed     -         12  -1.250       -      1",
        "b                      1234567890  failed        -          0       -       -      3  an error",
        "and more: see --limit and --count",
    ]


@pytest.mark.parametrize(("length", "shown"), [(100, 100), (101, 100)])
def test_a_row_that_just_fits_is_not_cut(length: int, shown: int) -> None:
    before = len("task  uid  status  step  staleness  reward  tokens  tries  ")
    failed = Answer(GroupRecord(1, "math", "failed", 0, 1, None, 1, (length - before) * "e"))
    row = as_table([failed], more=False).splitlines()[1]
    assert len(row) == shown
    assert row.endswith("...") is (length > 100)


def test_programs_get_a_line_of_json_for_each_group(ask: Ask) -> None:
    (line,) = ask('{"uid": 2}', "--json").output.splitlines()
    samples = [SampleOutcome(index, 1.0, 3, "stop", "", True) for index in range(2)]
    expected = GroupRecord(2, "math", "completed", 0, 2, 1.0, 1, samples=samples)
    assert line == as_lines([Answer(expected)])[0]
    assert orjson.loads(line) == {
        "uid": 2, "task": "math", "status": "completed", "staleness": 0, "arrival": 2, "reward": 1.0, "tries": 1,
        "error": "", "step": None, "min_reward": 1.0, "max_reward": 1.0, "tokens": 3, "finish_reason": ["stop"],
        "failure": [],
        "samples": [
            {"index": index, "reward": 1.0, "tokens": 3, "finish_reason": "stop", "error": "", "is_valid": True,
             "failure": None}
            for index in range(2)
        ],
    }  # fmt: skip
    assert ask('{"uid": 99}', "--json").output == ""


def test_samples_are_found_by_the_part_that_failed(ask: Ask) -> None:
    assert ask('{"sample": {"failure": "grader"}}', "--count").output == "1\n"
    assert ask('{"failure": "sandbox"}', "--count").output == "0\n"


def test_a_limit_ends_the_table_and_a_count_has_none(ask: Ask) -> None:
    limited = ask("{}", "--limit", "3").output.splitlines()
    assert (len(limited), limited[-1]) == (5, "and more: see --limit and --count")
    assert len(ask("{}", "--limit", "4").output.splitlines()) == 5
    assert len(ask("{}", "--limit", "3", "--json").output.splitlines()) == 3
    assert ask("{}", "--count").output == "4\n"
    assert ask("{}", "--count", "--limit", "1").output == "4\n"
    assert ask("{}", "--limit", "0").exit_code == 2


def test_xb15_every_example_of_the_help_is_a_query(ask: Ask) -> None:
    page = run("--help").output
    queries = [shlex.split(quoted)[0] for quoted in re.findall(r"'\{.*?\}'", page)]
    assert len(queries) == 12
    for query in queries:
        assert ask(query, "--count").exit_code == 0, query
    named = re.findall(r"^    (\$.*?)  ", page, re.MULTILINE)
    assert set(" ".join(named).split()) == {
        "$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$not_in", "$between", "$contains", "$or", "$and",
    }  # fmt: skip
    assert set(FIELDS) <= set(re.findall(r"^    ([a-z_]+)  ", page, re.MULTILINE))
    assert all(re.search(rf"\b{status}\b", page) for status in Status)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("{", "error: QUERY '{': not JSON: "),
        ("status", "error: QUERY 'status': not JSON: "),
        ('{"colour": 1}', "error: unknown field 'colour': the fields are uid, task"),
        ('{"uid": {"$about": 1}}', "error: unknown operator '$about' of field 'uid': the operators are $eq, "),
        ("7", "error: query 7: must be an object"),
    ],
)
def test_xb15_a_query_that_makes_no_sense_is_one_line(ask: Ask, query: str, message: str) -> None:
    found = ask(query)
    assert found.exit_code == 2
    assert found.output.startswith(message)
    assert found.output.count("\n") == 1


def test_the_run_is_that_of_the_file_named_or_else_of_the_one_in_this_folder(
    ask: Ask, server_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = run("{}")
    assert (missing.exit_code, "rollq.toml" in missing.output) == (2, True)
    task = '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    Path("rollq.toml").write_text(f'run = "{run_name}"\n[redis]\nbuffer_url = "{server_url}"\n{task}')
    Path("p.jsonl").write_text('{"prompt": "1+1"}\n')
    assert run("{}", "--count").output == "4\n"
    Path("rollq.toml").rename("other.toml")
    assert run("other.toml", "{}", "--count").output == "4\n"


@pytest.mark.parametrize("words", [("--run", "x"), ("--url", "redis://127.0.0.1:1/0")])
def test_half_a_place_is_none(words: tuple[str, ...]) -> None:
    found = run("rollq.toml", "{}", *words)
    assert (found.exit_code, found.output) == (2, "error: give either FILE (rollq.toml), or both --url and --run\n")


def test_texts_are_searched_and_what_they_say_cannot_control_the_terminal(ask: Ask, buffer: Buffer) -> None:
    assert ask('{"prompt": {"$contains": "MATH 1"}}', "--count").output == "1\n"
    assert ask('{"text": {"$contains": "xxxx"}}', "--count").output == "1\n"
    assert ask('{"text": {"$contains": "xxxx"}, "uid": 1}').output == "no groups\n"
    buffer.client.hset(task_keys(buffer.run, "math").group(3), "error", "\x1b[2J\x9b\u202e")
    for words in ([], ["--json"]):
        shown = ask('{"uid": 3}', *words).output
        assert all(character.isprintable() or character == "\n" for character in shown)


def test_a_search_in_texts_needs_the_folder_of_payloads(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLQ_PAYLOADS_URL", "/not/on/this/machine")
    refused = ask('{"text": {"$contains": "x"}}')
    assert (refused.exit_code, "/not/on/this/machine" in refused.output) == (2, True)
    assert ask('{"error": {"$contains": "x"}}').exit_code == 0


def test_a_task_that_the_run_does_not_have_is_refused(server_url: str, run_name: str) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        World(buffer).start(math={})
    arguments = ["groups", "query", '{"task": "maths"}', "--url", server_url, "--run", run_name]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "task 'maths': the run has math" in done.output
