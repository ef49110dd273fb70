import bz2
import gzip
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.buffer.errors import ConfigError, InvalidPrompt, RunMismatch
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from rollq.producer.columns import Columns
from rollq.producer.jsonl import MAX_LINE_BYTES
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import ProducerTask
from rollq.workers.judging.task_judge import row_reader


def task(path: Path, **changes: Any) -> ProducerTask:
    return ProducerTask(prompts=path, batch_groups=4, **changes)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def prompt_of(columns: Columns, row: dict[str, Any]) -> Prompt:
    """The prompt of a row without images."""
    prompt, images = columns.prompt(row)
    assert images == ()
    return prompt


def test_xs02_rows_are_read_by_number_in_any_order(tmp_path: Path) -> None:
    lines = [orjson.dumps({"prompt": f"p{i}", "answer": i}) for i in range(5)]
    path = written(tmp_path / "a.jsonl", b"\n".join(lines) + b"\n")
    with PromptFile(task(path)) as file:
        assert file.rows == 5
        assert [file.prompt(row).content for row in (3, 0, 4)] == ["p3", "p0", "p4"]
        assert file.prompt(2).answer == 2


@pytest.mark.parametrize("tail", [b"", b"\n", b"\n\n\n"])
def test_the_end_of_the_file_needs_no_newline(tmp_path: Path, tail: bytes) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt":"a","answer":1}\n\n{"prompt":"b","answer":1}' + tail)
    with PromptFile(task(path)) as file:
        assert [file.prompt(row).content for row in range(file.rows)] == ["a", "b"]


def test_windows_line_ends_and_byte_order_marks_are_understood(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt":"a","answer":1}\r\n{"prompt":"b","answer":1}\r\n')
    with PromptFile(task(path)) as file:
        assert [file.prompt(row).content for row in range(file.rows)] == ["a", "b"]


def test_lines_that_cross_read_chunks_keep_their_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollq.producer.jsonl._CHUNK_BYTES", 7)
    lines = [orjson.dumps({"prompt": "x" * i, "answer": i}) for i in range(1, 40)]
    path = written(tmp_path / "a.jsonl", b"\n".join(lines))
    with PromptFile(task(path)) as file:
        assert [len(str(file.prompt(row).content)) for row in range(file.rows)] == list(range(1, 40))


def test_xs05_columns_are_mapped_and_the_rest_is_metadata() -> None:
    row = {"q": "2+2?", "a": "4", "level": 3, "prompt_ids": [1, 2]}
    prompt = prompt_of(Columns(prompt_field="q", answer_field="a"), row)
    assert (prompt.content, prompt.answer, prompt.ids, prompt.metadata) == ("2+2?", "4", (1, 2), {"level": 3})


def test_xs05_messages_replace_a_missing_prompt_field() -> None:
    row = {"prompt": None, "messages": [{"role": "user", "content": "hi", "name": None}], "answer": None}
    prompt = prompt_of(Columns(), row)
    assert prompt.content == ({"role": "user", "content": "hi"},)
    assert prompt.metadata == {"prompt": None}


def test_the_content_of_a_message_that_calls_tools_may_be_null() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    result = {"role": "tool", "content": "3"}
    content = prompt_of(Columns(answer_field=""), {"prompt": [call, result]}).content
    assert content == ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, result)


def test_nulls_are_absent_at_every_depth_of_a_message() -> None:
    part = {"type": "text", "text": "2+2?", "image": None}
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 2, "b": None, "c": [{"d": None}]}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": [part]}]
    content = prompt_of(Columns(answer_field=""), {"prompt": messages}).content
    assert isinstance(content, tuple)
    assert content[0]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "c": [{}]}
    assert content[1]["content"] == [{"type": "text", "text": "2+2?"}]


SFT_ROW = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def test_messages_that_end_with_the_answer_are_refused_unless_the_task_says_what_it_means() -> None:
    with pytest.raises(
        ValueError, match=r'messages ends with the assistant.* set rows.final_answer = "answer".* "continue"'
    ):
        prompt_of(Columns(), {**SFT_ROW, "answer": "4"})
    taken = prompt_of(Columns(final_answer="answer"), SFT_ROW)
    assert (taken.content, taken.answer) == (tuple(SFT_ROW["messages"][:1]), "4")
    both = prompt_of(Columns(final_answer="answer"), {**SFT_ROW, "answer": "four"})
    assert (both.content, both.answer) == (tuple(SFT_ROW["messages"][:1]), "four")
    continued = prompt_of(Columns(final_answer="continue", answer_field=""), SFT_ROW)
    assert continued.content == tuple(SFT_ROW["messages"])
    with pytest.raises(ValueError, match="no message before the assistant's"):
        prompt_of(Columns(final_answer="answer"), {"messages": SFT_ROW["messages"][1:]})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"metadata_fields": ("levle",)},
            "metadata_fields: no row has a column 'levle'; the columns are answer, level",
        ),
        ({"metadata_fields": ("level", "extra.x")}, "metadata_fields: no row has a column 'extra.x'"),
        ({"images_field": "pictures"}, "images_field: no row has a column 'pictures'"),
        ({"ids_field": "tokens"}, "ids_field: no row has a column 'tokens'"),
    ],
)
def test_a_column_that_no_row_has_is_refused_with_those_that_exist(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = written(tmp_path / "p.jsonl", b'{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 1, "level": 2}\n')
    with pytest.raises(ConfigError, match=problem), PromptFile(task(path, **changes)):
        pass
    with PromptFile(task(path, metadata_fields=("level",))) as prompts:
        assert [prompts.prompt(row).metadata for row in range(2)] == [{"level": None}, {"level": 2}]


def test_numbers_keep_the_digits_of_the_file(tmp_path: Path) -> None:
    numbers = ["147573952589676412928", "1e-05", "0.12345678901234567890", "1.10", "-9223372036854775809"]
    lines = "".join(f'{{"prompt": "a", "answer": {number}}}\n' for number in numbers)
    with PromptFile(task(written(tmp_path / "p.jsonl", lines.encode()))) as prompts:
        answers = [decode_prompt(encode_prompt(prompts.prompt(row))).answer for row in range(len(numbers))]
    assert answers == [147573952589676412928, 1e-05, "0.12345678901234567890", 1.1, -9223372036854775809]


def test_an_empty_answer_field_means_no_answer() -> None:
    prompt = prompt_of(Columns(answer_field=""), {"prompt": "hi", "answer": 3})
    assert (prompt.answer, prompt.metadata) == (None, {"answer": 3})


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_xs05_a_path_leads_into_nested_columns() -> None:
    prompt = prompt_of(Columns(answer_field="reward_model.ground_truth"), VERL_ROW)
    assert (prompt.content, prompt.answer) == (tuple(VERL_ROW["prompt"]), "4")
    assert prompt.metadata.keys() == {"data_source", "reward_model", "extra_info"}, "a part was used, the whole is kept"
    chosen = prompt_of(Columns(answer_field="", metadata_fields=("data_source", "extra_info.index", "none")), VERL_ROW)
    assert chosen.metadata == {"data_source": "openai/gsm8k", "extra_info.index": 7, "none": None}


def test_a_column_with_dots_in_its_name_wins_over_a_path() -> None:
    assert prompt_of(Columns(answer_field="a.b"), {"prompt": "x", "a.b": 1, "a": {"b": 2}}).answer == 1
    assert prompt_of(Columns(answer_field="a.b"), {"prompt": "x", "a": {"b": {"c": 2}}}).answer == {"c": 2}


@pytest.mark.parametrize("row", [{"prompt": "x"}, {"prompt": "x", "a": 3}, {"prompt": "x", "a": None}])
def test_a_path_that_leads_nowhere_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no field 'a\.b' \(answer_field\)"):
        prompt_of(Columns(answer_field="a.b"), row)


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("columns", "asked", "content"),
    [
        (Columns(), "hi", "hi"),
        (Columns(chat=True), "hi", (USER,)),
        (Columns(system_prompt="Be brief."), "hi", (SYSTEM, USER)),
        (Columns(chat=True), [USER], (USER,)),
        (Columns(system_prompt="Be brief."), [USER], (SYSTEM, USER)),
        (Columns(system_prompt="Be long."), [SYSTEM, USER], (SYSTEM, USER)),
    ],
)
def test_texts_become_messages_and_get_a_system_prompt_by_setting(columns: Columns, asked: Any, content: Any) -> None:
    assert prompt_of(columns, {"prompt": asked, "answer": 1}).content == content


def test_a_row_has_its_own_system_prompt_or_the_tasks() -> None:
    columns = Columns(system_prompt="Be long.", system_prompt_field="rules.system")
    own = prompt_of(columns, {"prompt": "hi", "answer": 1, "rules": {"system": "Be brief."}})
    assert own.content == (SYSTEM, USER)
    without = prompt_of(columns, {"prompt": "hi", "answer": 1, "rules": {"system": None}})
    assert without.content == ({**SYSTEM, "content": "Be long."}, USER)
    with pytest.raises(ValueError, match=r"'rules\.system' \(system_prompt_field\) must be a string, not 3"):
        prompt_of(columns, {"prompt": "hi", "answer": 1, "rules": {"system": 3}})
    flat = Columns(chat=True, system_prompt_field="system")
    assert prompt_of(flat, {"prompt": "hi", "answer": 1, "system": "Be brief."}).metadata == {}
    assert Columns(metadata_fields=(), system_prompt_field="system").uses("system")
    assert str(Columns(system_prompt_field="system").absent(lambda: [{"prompt": "hi"}])).startswith(
        "system_prompt_field"
    )


def test_a_row_has_its_own_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"default": None}}}]
    columns = Columns(chat=True, tools_field="tools")
    for given in (tools, orjson.dumps(tools).decode()):
        prompt = prompt_of(columns, {"prompt": "hi", "answer": 1, "tools": given})
        assert (prompt.tools, prompt.metadata) == (tuple(tools), {})
    nothing: Any
    for nothing in ([], None, ""):
        assert prompt_of(columns, {"prompt": "hi", "answer": 1, "tools": nothing}).tools == ()
    filled, _ = columns.prompt({"prompt": "hi", "answer": 1, "tools": tools}, fills_gaps=True)
    assert filled.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    filled, _ = columns.prompt({"prompt": "hi", "answer": 1, "tools": orjson.dumps(tools).decode()}, fills_gaps=True)
    assert filled.tools == tuple(tools)
    assert Columns(metadata_fields=(), tools_field="tools").uses("tools")
    assert str(Columns(tools_field="tools").absent(lambda: [{"prompt": "hi"}])).startswith("tools_field: no row has")


@pytest.mark.parametrize(
    ("columns", "given", "problem"),
    [
        (Columns(chat=True), "add", r"field 'tools' \(tools_field\) is not JSON: 'add'"),
        (Columns(chat=True), 3, r"field 'tools' \(tools_field\) must be a list of tools, not 3"),
        (Columns(chat=True), [{"name": "add"}], r"field 'tools' \(tools_field\)\[0\] must be an object like"),
        (Columns(chat=True), False, r"field 'tools' \(tools_field\) must be a list of tools, not False"),
        (Columns(), [{"function": {"name": "add"}}], "the prompt is a string: set rows.chat = true"),
        (Columns(chat=True, ids_field="prompt"), [{"function": {"name": "add"}}], "token ids bypass it: leave out one"),
    ],
)
def test_tools_that_no_template_can_show_are_refused(columns: Columns, given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        prompt_of(replace(columns, tools_field="tools"), {"prompt": "hi", "answer": 1, "tools": given})


def test_a_reply_starts_with_the_prefix() -> None:
    columns = Columns(chat=True, reply_prefix="<think>")
    assert prompt_of(columns, {"prompt": "hi", "answer": 1}).content == (
        USER,
        {"role": "assistant", "content": "<think>"},
    )
    with pytest.raises(ValueError, match=r"prompt is a string, and reply_prefix .* set rows.chat = true"):
        prompt_of(Columns(reply_prefix="<think>"), {"prompt": "hi", "answer": 1})
    with pytest.raises(ValueError, match="messages ends with the assistant's message, so leave out reply_prefix"):
        prompt_of(Columns(final_answer="continue", answer_field="", reply_prefix="<think>"), SFT_ROW)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [("prompt", True), ("messages", True), ("reward", True), ("extra", True), ("ids", True), ("image", False)],
)
def test_only_columns_that_are_named_are_wanted_once_metadata_is_chosen(column: str, wanted: bool) -> None:
    columns = Columns(answer_field="reward.truth", ids_field="ids", metadata_fields=("extra",))
    assert columns.uses(column) is wanted
    assert Columns().uses(column)


def test_a_prompt_knows_its_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt":"a","answer":1}\n\n{"prompt":"b","answer":1}')
    with PromptFile(task(path)) as file:
        assert [file.prompt(row).row for row in (1, 0)] == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "a JSON object is expected, not list"),
        (b"null", "a JSON object is expected"),
        (b'{"prompt": NaN, "answer": 1}', "not JSON"),
        (b'{"prompt": "\xff", "answer": 1}', "not UTF-8 at byte 12"),
        (b'{"prompt": "\\ud800", "answer": 1}', "not JSON"),
        (b'{"question": "a", "answer": 1}', r"no field 'prompt' \(prompt_field\).*\['answer', 'question'\]"),
        (b'{"prompt_ids": [1], "answer": 1}', "no field 'prompt' .* token ids need a text beside them; the row has"),
        (b'{"prompt": "a"}', "no field 'answer'"),
        (b'{"prompt": "", "answer": 1}', "field 'prompt' is empty"),
        (b'{"prompt": 3, "answer": 1}', "must be a string or a list of messages, not 3"),
        (b'{"prompt": [], "answer": 1}', "must be a string or a list of messages"),
        (b'{"prompt": ["a"], "answer": 1}', r"prompt\[0\] must be an object"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', r"prompt\[0\].content"),
        (b'{"prompt": [{"role": "user", "content": null, "tool_calls": null}], "answer": 1}', r"prompt\[0\].content"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": [1, -1]}', "range from -1 to 1; token ids range from 0"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": [true]}', "values that are not integers"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": 7}', "list of token ids"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": %b1%b, "answer": 1}' % (b"[" * 1000, b"]" * 1000), "nested more than 254 levels"),
        (b'{"messages": %b1%b, "answer": 1}' % (b"[" * 500, b"]" * 500), "nested more than 254 levels"),
        (b'{"prompt": "x", "answer": %b1%b}' % (b'{"a":' * 1000, b"}" * 1000), "nested more than 254 levels"),
    ],
)
def test_xs05_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = written(tmp_path / "bad.jsonl", b'{"prompt":"a","answer":1}\n\n' + line + b"\n")
    with PromptFile(task(path)) as file, pytest.raises(InvalidPrompt, match=f"bad.jsonl:3: .*{message}"):
        file.prompt(1)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.jsonl", b'[\n{"prompt": "a", "answer": 1},\n{"prompt": "b", "answer": 1}\n]\n', "one JSON array: .*jq -c"),
        ("a.json", b' [{"prompt": "a", "answer": 1}]', "one JSON array"),
        ("a.json", b'\xef\xbb\xbf{\n  "prompt": "a"\n}\n', "JSON objects over several lines"),
        ("a.csv", b"prompt,answer\na,1\n", "a table of CSV"),
        ("a.tsv", b"prompt\tanswer\na\t1\n", "a table of TSV"),
        (
            "a.jsonl.gz",
            gzip.compress(mtime=0, data=b'{"prompt": "a"}'),
            "compressed with gzip: unpack it with gunzip",
        ),
        ("a.jsonl", lzma.compress(b"{}"), "compressed with xz"),
        ("a.jsonl", bz2.compress(b"{}"), "compressed with bzip2"),
        ("a.data", b"PAR1...", r"a Parquet file: give it a name that ends with \.parquet"),
        ("a.jsonl", '{"prompt": "a"}'.encode("utf-16"), "text in UTF-16"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem), PromptFile(task(written(tmp_path / name, data))):
        pass


def test_blank_lines_are_not_rows_whatever_ends_them(tmp_path: Path) -> None:
    row = b'{"prompt": "a", "answer": 1}'
    with PromptFile(task(written(tmp_path / "a.jsonl", b"\r\n".join([row, b"", b"  ", row, b"\t", b""])))) as file:
        assert [file.place(row)[-2:] for row in range(file.rows)] == [":1", ":4"]
        assert [file.prompt(row).content for row in range(file.rows)] == ["a", "a"]


def test_an_answer_that_the_judge_cannot_use_makes_its_row_unusable(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt": "a", "answer": "1,5"}\n{"prompt": "b", "answer": null}\n')
    with PromptFile(task(path), row_reader("last_number", {})) as file:
        with pytest.raises(InvalidPrompt, match=r"a\.jsonl:1: the answer '1,5' is ambiguous as a number"):
            file.prompt(0)
        with pytest.raises(InvalidPrompt, match=r"a\.jsonl:2: the prompt has no answer"):
            file.prompt(1)


def test_a_line_past_the_limit_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        file.seek(MAX_LINE_BYTES + 1)
        file.write(b"x\n")
    with PromptFile(task(path)) as rows, pytest.raises(InvalidPrompt, match=r"big.jsonl:1: .* bytes in one line"):
        rows.prompt(0)


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt":"a","answer":1}\n{"prompt":"b","answer":1}\n')
    with PromptFile(task(path)) as file:
        path.write_bytes(b'{"prompt":"a","answer":1}\n')
        with pytest.raises(RunMismatch, match=r"a\.jsonl' was changed while it was in use"):
            file.prompt(1)


@pytest.mark.parametrize("data", [b"", b"\n\n\n"])
def test_an_empty_file_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "a.jsonl", data)
    with pytest.raises(ConfigError, match=r"a\.jsonl' is empty"), PromptFile(task(path)):
        pass


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none.arrow"])
def test_a_missing_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: No such file"), PromptFile(task(tmp_path / name)):
        pass


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_xs02_the_constructor_reads_nothing(tmp_path: Path, name: str) -> None:
    PromptFile(task(tmp_path / name))


def test_a_folder_without_a_dataset_is_one_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"is a folder without a dataset: .parquet files, or"),
        PromptFile(task(tmp_path)),
    ):
        pass


def test_a_file_that_is_not_utf8_is_refused_with_its_first_line_that_is_not(tmp_path: Path) -> None:
    rows = ['{"prompt": "Wie heißt sie?", "answer": 1}', '{"prompt": "a", "answer": 1}'] * 3
    path = written(tmp_path / "latin.jsonl", "\n".join(["", *rows]).encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.jsonl' is not UTF-8: .*latin.jsonl:2: not UTF-8 at byte 19 of the"):
        PromptFile(task(path)).__enter__()
    with PromptFile(task(path, max_bad_rows=0.5)) as file:
        assert file.prompt(1).content == "a"
