from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.settings import TaskSettings
from rollq.producer.prompts import MAX_LINE_BYTES, PromptFile, parse_prompt


def task(path: Path, **changes: Any) -> TaskSettings:
    return TaskSettings(prompts=path, batch_groups=4, **changes)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_rows_are_read_by_number_in_any_order(tmp_path: Path) -> None:
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
    monkeypatch.setattr("rollq.producer.prompts._CHUNK_BYTES", 7)
    lines = [orjson.dumps({"prompt": "x" * i, "answer": i}) for i in range(1, 40)]
    path = written(tmp_path / "a.jsonl", b"\n".join(lines))
    with PromptFile(task(path)) as file:
        assert [len(str(file.prompt(row).content)) for row in range(file.rows)] == list(range(1, 40))


def test_fields_are_mapped_and_the_rest_is_metadata() -> None:
    prompt = parse_prompt(b'{"q": "2+2?", "a": "4", "level": 3, "prompt_ids": [1, 2]}', "q", "a")
    assert (prompt.content, prompt.answer, prompt.ids, prompt.metadata) == ("2+2?", "4", (1, 2), {"level": 3})


def test_messages_stand_in_for_a_missing_prompt_field() -> None:
    prompt = parse_prompt(b'{"messages": [{"role": "user", "content": "hi"}], "answer": null}', "prompt", "answer")
    assert prompt.content == ({"role": "user", "content": "hi"},)
    assert prompt.metadata == {}


def test_an_empty_answer_field_means_no_answer() -> None:
    prompt = parse_prompt(b'{"prompt": "hi", "answer": 3}', "prompt", "")
    assert (prompt.answer, prompt.metadata) == (None, {"answer": 3})


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
        (b'{"prompt": "a"}', "no field 'answer'"),
        (b'{"prompt": "", "answer": 1}', "field 'prompt' is empty"),
        (b'{"prompt": 3, "answer": 1}', "must be a text or a list of messages, not 3"),
        (b'{"prompt": [], "answer": 1}', "must be a text or a list of messages"),
        (b'{"prompt": ["a"], "answer": 1}', r"prompt\[0\] must be an object"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', r"prompt\[0\].content"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": [1, -1]}', "-1, which is no token id"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": [true]}', "True, which is no token id"),
        (b'{"prompt": "a", "answer": 1, "prompt_ids": 7}', "list of token ids"),
        (b"\r", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = written(tmp_path / "bad.jsonl", b'{"prompt":"a","answer":1}\n\n' + line + b"\n")
    with PromptFile(task(path)) as file, pytest.raises(InvalidPrompt, match=f"bad.jsonl:3: .*{message}"):
        file.prompt(1)


def test_a_line_past_the_limit_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        file.seek(MAX_LINE_BYTES + 1)
        file.write(b"x\n")
    with PromptFile(task(path)) as rows, pytest.raises(InvalidPrompt, match=r"big.jsonl:1: .* bytes in one line"):
        rows.prompt(0)


def test_a_file_that_shrank_gives_bad_rows_not_wrong_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt":"a","answer":1}\n{"prompt":"b","answer":1}\n')
    with PromptFile(task(path)) as file:
        path.write_bytes(b'{"prompt":"a","answer":1}\n')
        with pytest.raises(InvalidPrompt, match=r"a\.jsonl:2"):
            file.prompt(1)


@pytest.mark.parametrize("data", [b"", b"\n\n\n"])
def test_an_empty_file_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "a.jsonl", data)
    with pytest.raises(ConfigError, match=r"a\.jsonl' is empty"), PromptFile(task(path)):
        pass


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"none\.jsonl' cannot be read: No such file"),
        PromptFile(task(tmp_path / "none.jsonl")),
    ):
        pass


def test_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"), PromptFile(task(tmp_path)):
        pass
