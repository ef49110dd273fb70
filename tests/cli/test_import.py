"""`rollq import`: which files it reads, what it refuses, and that nothing is imported twice."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Group
from rollq.cli.commands.import_ import source_of
from rollq.cli.demo.tiny_model import make_tokenizer
from rollq.cli.main import main
from rollq.cli.settings.file import load_settings
from rollq.workers.tokenizers.byte import EOS_ID
from support.buffer_run import World
from support.waiting import wait_until

FILE = """
run = "{run}"
[redis]
buffer_url = "{url}"
[worker]
engine = "simulated"
[tasks.math]
prompts = "math.jsonl"
batch_groups = 2
group_size = 2
[tasks.demos]
offline = true
batch_groups = 2
group_size = 2
max_tokens = 20
"""


@pytest.fixture
def settings(tmp_path: Path, server_url: str, run_name: str) -> Path:
    path = tmp_path / "rollq.toml"
    path.write_text(FILE.format(run=run_name, url=server_url))
    return path


@pytest.fixture
def world(settings: Path, server_url: str, run_name: str) -> Iterator[World]:
    with Buffer.connect(server_url, run_name) as buffer:
        yield World(buffer)


def written(folder: Path, *rows: Any, name: str = "expert.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def import_(data: Path, settings: Path, *options: str, task: str = "demos") -> Result:
    """Most rows of these tests have no logprobs, and their settings no trainer."""
    return strictly_import(data, settings, "--without-logprobs", *options, task=task)


def strictly_import(data: Path, settings: Path, *options: str, task: str = "demos") -> Result:
    return CliRunner().invoke(main, ["import", str(settings), task, str(data), *options])


def row(number: int = 0, **changed: Any) -> dict[str, Any]:
    """A good row of two responses; a value of None leaves a column out."""
    found = {"prompt": f"prompt {number}", "responses": ["yes", "no"], "rewards": [1, 0], **changed}
    return {name: value for name, value in found.items() if value is not None}


def groups(world: World, count: int) -> list[Group]:
    """The first groups of the task, as a trainer gets them."""
    world.begin(0, launch_id="a trainer")
    return list(world.buffer.fetch(world.claim(1, demos=count).groups))


def ids_of(group: Group) -> list[list[int]]:
    return [sample.segments[0].response_ids.tolist() for sample in group.samples]


def test_texts_become_tokens_with_an_end(settings: Path, world: World) -> None:
    data = written(settings.parent, row(1, answer=7, level=3))
    found = import_(data, settings)
    assert found.output == f"imported 1 group of {data} into task demos ({source_of(data)})\n"
    (group,) = groups(world, 1)
    assert ids_of(group) == [[*b"yes", EOS_ID], [*b"no", EOS_ID]]
    assert group.samples[0].segments[0].prompt_ids.tolist() == [*b"prompt 1"]
    assert [sample.text for sample in group.samples] == ["yes", "no"]
    assert [sample.reward for sample in group.samples] == [1.0, 0.0]
    assert (group.prompt.content, group.prompt.answer, group.prompt.metadata) == ("prompt 1", 7, {"level": 3})
    assert all(np.isnan(sample.segments[0].logprobs).all() for sample in group.samples)
    world.check()


ROWS: dict[str, dict[str, Any]] = {
    "ids": row(responses=[[1, 2], [3]]),
    "ids and logprobs": row(responses=[[1, 2], [3]], logprobs=[[-0.5, -1.0], None]),
    "messages": row(prompt=None, messages=[{"role": "user", "content": "q"}], responses=[[1, 2], [3]]),
    "prompt ids": row(prompt_ids=[9, 8], responses=[[1, 2], [3]]),
    "one reward for all": row(responses=[[1, 2], [3]], rewards=None, reward=0.5),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_other_forms(settings: Path, world: World, kind: str) -> None:
    assert import_(written(settings.parent, ROWS[kind]), settings).exit_code == 0
    (group,) = groups(world, 1)
    assert ids_of(group) == [[1, 2], [3]]
    first, second = (sample.segments[0] for sample in group.samples)
    if kind == "ids and logprobs":
        assert first.logprobs.tolist() == [-0.5, -1.0]
        assert np.isnan(second.logprobs).all()
    if kind == "messages":
        assert bytes(first.prompt_ids.tolist()) == b"user: q\n"
    if kind == "prompt ids":
        assert first.prompt_ids.tolist() == [9, 8]
    if kind == "one reward for all":
        assert [sample.reward for sample in group.samples] == [0.5, 0.5]


@pytest.mark.parametrize("field", ["response", "completion"])
def test_one_response_is_a_group_of_one(settings: Path, field: str) -> None:
    settings.write_text(settings.read_text().replace("group_size = 2", "group_size = 1"))
    data = written(settings.parent, row(responses=None, rewards=[1]) | {field: "yes"})
    assert import_(data, settings, "--dry-run").output == f"1 group of {data} can be imported\n"


def test_a_json_list_and_a_parquet_file(settings: Path, world: World) -> None:
    listed = settings.parent / "expert.json"
    listed.write_bytes(orjson.dumps([row(1), row(2)]))
    table = settings.parent / "expert.parquet"
    parquet.write_table(pa.Table.from_pylist([row(3), row(4), row(5)]), table)
    assert import_(listed, settings).exit_code == 0
    assert import_(table, settings).exit_code == 0
    found = groups(world, 5)
    assert [group.prompt.content for group in found] == [f"prompt {number}" for number in range(1, 6)]
    assert {tuple(map(tuple, ids_of(group))) for group in found} == {((*b"yes", EOS_ID), (*b"no", EOS_ID))}


def test_nulls_that_parquet_fills_in_are_not_imported(settings: Path, world: World) -> None:
    table = settings.parent / "expert.parquet"
    rows = [row(1) | {"meta": {"a": 1}}, row(2) | {"meta": {"b": 2}}]
    parquet.write_table(pa.Table.from_pylist(rows), table)
    assert import_(table, settings).exit_code == 0
    assert [group.prompt.metadata["meta"] for group in groups(world, 2)] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_rollq_export_wrote_comes_back_without_its_versions(settings: Path, world: World, form: str) -> None:
    world.start(math={}, demos={"offline": True})
    world.complete(3)
    exported = settings.parent / f"exported.{form}"
    command = ["export", str(settings), '{"task": "math"}', "--format", form, "--to", str(exported)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert import_(exported, settings).exit_code == 0
    before = world.buffer.fetch(world.claim(1, math=3).groups)
    world.buffer.commit(world.held, 1)
    after = world.buffer.fetch(world.claim(2, demos=3).groups)
    for one, other in zip(before, after, strict=True):
        assert one.prompt == other.prompt
        for sample, copy in zip(one.samples, other.samples, strict=True):
            assert copy.is_inserted
            assert (sample.reward, sample.text) == (copy.reward, copy.text)
            np.testing.assert_array_equal(sample.segments[0].logprobs, copy.segments[0].logprobs)
            np.testing.assert_array_equal(sample.segments[0].response_ids, copy.segments[0].response_ids)
    world.check()


def without_last_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0])


def test_an_export_that_lacks_samples_is_refused(settings: Path, world: World) -> None:
    world.start(math={}, demos={"offline": True})
    world.complete(2)
    exported = settings.parent / "exported.jsonl"
    command = ["export", str(settings), '{"task": "math"}', "--to", str(exported)]
    assert CliRunner().invoke(main, command).exit_code == 0
    without_last_line(exported)
    found = import_(exported, settings)
    assert f"{exported}:3: the group has 1 samples, its task's group_size is 2" in found.output
    assert world.statuses("demos") == {}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "count": (row(responses=["a", "b", "c"]), "'responses' has 3 responses, and the task's group_size is 2: list 2"),
    "one": (row(responses=None, response="a"), "'response' has 1 response, and the task's group_size is 2"),
    "none": (row(responses=None), "no field 'responses', 'response', 'completion'"),
    "prompt": (row(prompt=None), "no field 'prompt' (prompt_field), nor 'messages'"),
    "reward": (row(rewards=None), "no field 'reward' or 'rewards'; --reward gives one"),
    "rewards": (row(rewards=[1]), "1 rewards for 2 responses"),
    "reward text": (row(rewards=["a", 1]), "a reward is 'a', not a number"),
    "nan": (row(rewards=[1, float("nan")]), "a reward is None, not a number"),
    "logprobs": (
        row(logprobs=[[-1.0], [-1.0]]),
        "response 0 has 1 logprobs and 4 tokens; with logprobs, give token ids",
    ),
    "logprobs form": (row(logprobs=[-1.0]), "'logprobs' must have a list of numbers for each of the 2 responses"),
    "positive": (row(responses=[[1], [2]], logprobs=[[1.0], [-1.0]]), "sample 0: logprobs[0] is 1.0"),
    "ids": (row(responses=[[1], [-2]]), "response 1"),
    "form": (row(responses=[{"text": "a"}]), "'responses' must be a string, token ids, or a list of these"),
    "long": (row(responses=["a" * 20, "b"]), "sample 0: the response has 21 tokens, more than max_tokens = 20"),
    "long prompt": (row(prompt="a" * 5000), "the prompt has 5000 tokens, more than max_prompt_tokens = 4096"),
    "empty": (row(responses=[[], [1]]), "response 0"),
    "large": (row(rewards=[1e308, 1e308]), "sample 0: reward is 1e+308, expected a finite number of 32 bits"),
    "half an export": (
        row(prompt_record="{}", task="math", group_id=1, sample=0, response_ids=[1]),
        "is not a complete row of `rollq export`: KeyError('arrays')",
    ),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_row_is_named_and_nothing_is_imported(settings: Path, world: World, problem: str) -> None:
    bad, message = BAD[problem]
    data = written(settings.parent, row(), row(), bad, row())
    found = import_(data, settings)
    assert found.exit_code == 1
    assert f"error: {data}:3: " in found.output
    assert message in found.output
    assert not list(world.buffer.client.scan_iter(match=f"rollq:{{{world.buffer.run}*"))


def test_a_default_reward_stands_for_what_is_missing(settings: Path, world: World) -> None:
    data = written(settings.parent, row(rewards=None), row(rewards=[None, 0.25]))
    assert import_(data, settings, "--reward", "2").exit_code == 0
    found = groups(world, 2)
    assert [[sample.reward for sample in group.samples] for group in found] == [[2.0, 2.0], [2.0, 0.25]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"{}", "does not contain a list"),
        (b"[1", "is not JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(settings: Path, content: bytes | None, message: str) -> None:
    data = settings.parent / ("expert.json" if content else "expert.jsonl")
    if content is not None:
        data.write_bytes(content)
    found = import_(data, settings)
    assert found.exit_code == 2
    assert message in found.output


def test_ids_of_another_vocabulary_are_refused(settings: Path) -> None:
    model = settings.parent / "model"
    make_tokenizer().save_pretrained(model)
    (model / "config.json").write_text('{"vocab_size": 300}')
    with settings.open("a") as file:
        file.write(f'[trainer]\nmodel = "{model}"\noutput = "out"\nsteps = 1\n')
    data = written(settings.parent, row(responses=[[299, 1], [300]]))
    found = import_(data, settings, "--dry-run")
    assert found.exit_code == 1
    assert f"{data}:1: sample 1: response_ids[0] is 300; ids go from 0 to 299" in found.output


def test_a_torn_parquet_file_is_refused(settings: Path) -> None:
    data = settings.parent / "expert.parquet"
    parquet.write_table(pa.Table.from_pylist([row()]), data)
    data.write_bytes(data.read_bytes()[:-4])
    found = import_(data, settings)
    assert found.exit_code == 2
    assert f"file {str(data)!r} is damaged, or is not a Parquet file" in found.output


def test_only_tasks_that_are_offline_take_imports(settings: Path) -> None:
    data = written(settings.parent, row())
    assert "task 'math' is sampled by workers" in import_(data, settings, task="math").output
    assert "task 'other'" in import_(data, settings, task="other").output


def test_a_repeated_import_says_so_and_an_interrupted_one_continues(settings: Path, world: World) -> None:
    data = written(settings.parent, *map(row, range(5)))
    assert import_(data, settings).exit_code == 0
    found = import_(data, settings)
    assert found.output == f"already imported: task demos has the 5 groups of {data} ({source_of(data)})\n"
    copy = written(settings.parent, *map(row, range(5)), name="copy.jsonl")
    assert "already imported" in import_(copy, settings).output
    assert world.statuses("demos") == {"completed": 5}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_import_that_is_ended_continues_where_it_was(settings: Path, world: World, number: signal.Signals) -> None:
    count = 1000
    data = written(settings.parent, *map(row, range(count)))
    command = [
        sys.executable,
        "-m",
        "rollq.cli.main",
        "import",
        str(settings),
        "demos",
        str(data),
        "--without-logprobs",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as importer:
        wait_until(lambda: bool(world.buffer.client.hgetall(f"rollq:{{{world.buffer.run}:demos}}:sources")))
        importer.send_signal(number)
        output, _ = importer.communicate()
    if number is signal.SIGINT:
        assert importer.returncode == 0
        assert "the same command continues" in output or "imported" in output
    assert 0 < world.buffer.inserted("demos", source_of(data)) <= count
    assert import_(data, settings).exit_code == 0
    assert world.statuses("demos") == {"completed": count}
    claimed = groups(world, count)
    assert [group.prompt.content for group in claimed] == [f"prompt {number}" for number in range(count)]


def test_a_dry_run_needs_no_server(settings: Path) -> None:
    settings.write_text(FILE.format(run="r", url="redis://127.0.0.1:1/0"))
    data = written(settings.parent, row(), row())
    found = import_(data, settings, "--dry-run")
    assert (found.exit_code, found.output) == (0, f"2 groups of {data} can be imported\n")


CHANGES: dict[str, Callable[[str], str]] = {
    "demos: prompts: a task with offline = true is never sampled": lambda text: text + 'prompts = "p.jsonl"\n',
    "demos: judge, temperature: a task with offline = true": lambda text: text + 'judge = "m"\ntemperature = 1.0\n',
    "demos: shards: a task with offline = true has one shard": lambda text: text + "batches.shards = 2\n",
    "math.prompts: is required": lambda text: text.replace('prompts = "math.jsonl"\n', ""),
}


@pytest.mark.parametrize("message", CHANGES)
def test_settings_that_do_not_fit_an_offline_task_are_refused(settings: Path, message: str) -> None:
    settings.write_text(CHANGES[message](settings.read_text()))
    with pytest.raises(ConfigError) as found:
        load_settings(settings, {})
    assert message in str(found.value)


def test_producers_and_workers_leave_offline_tasks_out(settings: Path) -> None:
    found = load_settings(settings, {})
    assert list(found.all_tasks()) == ["math", "demos"]
    assert list(found.produced_tasks()) == list(found.served_tasks()) == ["math"]
    text = settings.read_text()
    settings.write_text(text[: text.index("[tasks.math]")] + text[text.index("[tasks.demos]") :])
    for command in ("produce", "work"):
        refused = CliRunner().invoke(main, [command, str(settings)])
        assert refused.exit_code == 2
        assert f"`rollq {command}` has nothing to do: every task has offline = true" in refused.output


def test_a_group_of_one_needs_a_baseline_of_the_batch(settings: Path) -> None:
    trainer = '[trainer]\nmodel = "m"\noutput = "o"\nsteps = 1\n'
    text = settings.read_text().replace("group_size = 2", "group_size = 1") + trainer
    settings.write_text(text)
    with pytest.raises(ConfigError, match=r"group_size = 1: with trainer\.advantages\.baseline"):
        load_settings(settings, {})
    settings.write_text(text + '[trainer.advantages]\nbaseline = "batch"\nscale = "none"\n')
    assert load_settings(settings, {}).tasks["demos"].offline


def test_status_and_show_name_the_source_and_no_version(settings: Path, world: World) -> None:
    data = written(settings.parent, row())
    assert import_(data, settings).exit_code == 0
    status = CliRunner().invoke(main, ["status", str(settings)]).output
    assert "demos: offline: 1 groups were inserted so far" in status
    shown = CliRunner().invoke(main, ["groups", "show", str(settings), "demos", "1"]).output
    assert f"inserted from {source_of(data)}" in shown
    assert "4 tokens: of no version; the loss counts 4" in shown
    plain = orjson.loads(CliRunner().invoke(main, ["groups", "show", str(settings), "demos", "1", "--json"]).output)
    segment = plain["samples"][0]["segments"][0]
    assert (segment["versions"], segment["logprobs"]) == (None, [None] * 4)


def test_rows_that_the_trainer_would_leave_out_are_refused_before_any_is_written(
    tmp_path: Path, settings: Path, world: World
) -> None:
    data = written(tmp_path, row(), row(1, responses=[[1], [2]], logprobs=[[-1.0], [-2.0]]))
    make_tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"vocab_size": 300, "model_type": "qwen3"}')
    before = settings.read_text() + f'[trainer]\nmodel = "{tmp_path / "m"}"\noutput = "o"\nsteps = 1\n'
    settings.write_text(before)
    for options in ([], ["--dry-run"], ["--without-logprobs"]):
        refused = strictly_import(data, settings, *options)
        assert refused.exit_code == 2
        assert "1 of 2 groups have no logprobs, and the loss in [trainer] needs them: set absent_log" in refused.output
    assert not world.buffer.send("EXISTS", world.buffer.keys.info)
    for loss in ('absent_logprobs = "current"', "sft = { demos = 0.1 }"):
        settings.write_text(f"{before}[trainer.loss]\n{loss}\n")
        assert strictly_import(data, settings, "--dry-run").exit_code == 0


def test_without_a_trainer_in_the_settings_absent_logprobs_need_a_word(
    tmp_path: Path, settings: Path, world: World
) -> None:
    data = written(tmp_path, row())
    refused = strictly_import(data, settings)
    assert refused.exit_code == 2
    assert "1 of 1 groups have no logprobs, and the settings have no table [trainer]" in refused.output
    assert "repeat the command with --without-logprobs" in refused.output
    assert not world.buffer.send("EXISTS", world.buffer.keys.info)
    assert import_(data, settings).exit_code == 0
    known = written(tmp_path, row(responses=[[1], [2]], logprobs=[[-1.0], [-2.0]]), name="known.jsonl")
    assert strictly_import(known, settings).exit_code == 0
    assert world.buffer.counts("demos").ready == 2
