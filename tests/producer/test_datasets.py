"""Hugging Face data on disk, read with the real package, without the network."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import ProducerTask

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}, "level": 1},
    {"prompt": [{"role": "user", "content": "hm", "name": "x"}], "reward_model": {"ground_truth": None}, "level": None},
    {"prompt": [], "reward_model": {"ground_truth": "4"}, "level": 3},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("prompts are read from this machine alone")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def as_parquet(rows: list[dict[str, Any]], folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(str(folder / "a.parquet"))
    return folder / "a.parquet"


def as_folder(rows: list[dict[str, Any]], folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_arrow(rows: list[dict[str, Any]], folder: Path) -> Path:
    (file,) = as_folder(rows, folder).glob("*.arrow")
    return file


def as_shards(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Parquet files of a row each, in a folder."""
    import datasets

    (folder / "train").mkdir()
    for number, row in enumerate(rows):
        whole = datasets.Dataset.from_list(rows)
        datasets.Dataset.from_list([row], features=whole.features).to_parquet(
            str(folder / "train" / f"{number}.parquet")
        )
    return folder / "train"


def task(path: Path, **changes: Any) -> ProducerTask:
    return ProducerTask(prompts=path, batch_groups=4, **{"answer_field": "reward_model.ground_truth", **changes})


@pytest.mark.parametrize("write", [as_parquet, as_folder, as_arrow, as_shards])
def test_xs05_rows_of_every_format_become_the_same_prompts(
    tmp_path: Path, write: Callable[[list[dict[str, Any]], Path], Path]
) -> None:
    path = write(ROWS, tmp_path)
    with PromptFile(task(path)) as file:
        assert file.rows == 3
        second, first = file.prompt(1), file.prompt(0)
        with pytest.raises(InvalidPrompt, match=rf"{path.name}\[2\]: field 'prompt' must be a string or a list"):
            file.prompt(2)
    assert first.content == ({"role": "user", "content": "1+1?"},), "the gap that the table filled is gone"
    assert (first.answer, first.metadata, first.row) == ("2", {"reward_model": {"ground_truth": "2"}, "level": 1}, 0)
    assert second.content == ({"role": "user", "content": "hm", "name": "x"},)
    assert (second.answer, second.metadata["level"], second.row) == (None, None, 1)


@pytest.mark.parametrize("write", [as_parquet, as_folder, as_arrow, as_shards])
def test_gaps_that_a_table_fills_are_absent_from_answers_and_metadata(
    tmp_path: Path, write: Callable[[list[dict[str, Any]], Path], Path]
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": {"x": 1, "in": [{"y": 2}, None]}, "info": {"call": {"a": 1}}, "level": None},
        {"prompt": "b", "answer": {"z": 3, "in": [{"w": 4}]}, "info": {"call": {"b": 2}}, "level": 1},
        {"prompt": "c", "answer": None, "info": None, "level": 2},
    ]
    path = write(rows, tmp_path)
    with PromptFile(task(path, answer_field="answer")) as file:
        prompts = [file.prompt(row) for row in range(3)]
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in rows]
    assert [prompt.metadata for prompt in prompts] == [{"info": row["info"], "level": row["level"]} for row in rows]
    with PromptFile(task(path, answer_field="info.call.a", metadata_fields=("answer.z",))) as file:
        assert (file.prompt(1).answer, file.prompt(0).metadata) == (None, {"answer.z": None})


def test_nulls_that_json_lines_hold_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": {"x": null}, "info": {"y": null}}\n')
    with PromptFile(task(path, answer_field="answer")) as file:
        prompt = file.prompt(0)
    assert (prompt.answer, prompt.metadata) == ({"x": None}, {"info": {"y": None}})


def test_columns_that_json_cannot_hold_make_bad_rows_unless_they_are_left_out(tmp_path: Path) -> None:
    path = as_parquet([{"prompt": "what is this?", "image": b"\x89PNG", "answer": "a cat", "level": 2}], tmp_path)
    with (
        PromptFile(task(path, answer_field="answer")) as file,
        pytest.raises(InvalidPrompt, match=r"column 'image' .* list the needed columns in rows.metadata_fields"),
    ):
        file.prompt(0)
    with PromptFile(task(path, answer_field="answer", metadata_fields=["level"])) as file:
        assert file.prompt(0).metadata == {"level": 2}


def test_a_row_past_the_limit_is_a_bad_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollq.producer.hf_datasets.MAX_ROW_BYTES", 10)
    path = as_parquet([{"prompt": "x" * 20, "answer": "1"}], tmp_path)
    with (
        PromptFile(task(path, answer_field="answer")) as file,
        pytest.raises(InvalidPrompt, match=r"25 bytes in one row; at most 10"),
    ):
        file.prompt(0)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    for text in ("old", "new"):
        path = as_parquet([{"prompt": text, "answer": "1"}], tmp_path)
        with PromptFile(task(path, answer_field="answer")) as file:
            assert file.prompt(0).content == text


@pytest.mark.parametrize("name", ["junk.parquet", "junk.arrow"])
@pytest.mark.parametrize("data", [b"", b"junk" * 20])
def test_a_file_of_another_kind_is_one_clear_error(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: "), PromptFile(task(tmp_path / name)):
        pass


def test_a_table_without_rows_is_one_clear_error(tmp_path: Path) -> None:
    import datasets

    empty = datasets.Dataset.from_dict({"prompt": [], "answer": []})
    empty.to_parquet(str(tmp_path / "none.parquet"))
    empty.save_to_disk(str(tmp_path / "none"))
    for name in ("none.parquet", "none"):
        with pytest.raises(ConfigError, match=f"{name}' .*is empty"), PromptFile(task(tmp_path / name)):
            pass


def test_a_folder_of_splits_asks_for_one_of_them(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "both"))
    with (
        pytest.raises(ConfigError, match="both' holds the splits train, test: name one, such as 'both/train'"),
        PromptFile(task(tmp_path / "both")),
    ):
        pass
    with PromptFile(task(tmp_path / "both" / "test")) as file:
        assert file.rows == 3


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    path = as_parquet(ROWS, tmp_path)
    program = (
        "import sys\nsys.modules['datasets'] = None\n"
        "from pathlib import Path\nfrom rollq.producer.settings import ProducerTask\n"
        "from rollq.producer.prompts import PromptFile\n"
        f"PromptFile(ProducerTask(prompts=Path({str(path)!r}), batch_groups=1)).__enter__()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "a.parquet' need the package 'datasets': pip install 'rollq[datasets]', or use JSON Lines"
    )


def test_the_package_is_not_imported_for_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": 1}\n')
    program = (
        "import sys\nfrom pathlib import Path\nfrom rollq.producer.settings import ProducerTask\n"
        "from rollq.producer.prompts import PromptFile\n"
        f"with PromptFile(ProducerTask(prompts=Path({str(tmp_path / 'a.jsonl')!r}), batch_groups=1)) as file:\n"
        "    file.prompt(0)\n"
        "assert not {'datasets', 'pyarrow', 'pandas', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("write", [as_parquet, as_arrow, as_folder])
def test_the_fingerprint_of_a_dataset_follows_from_its_content(
    tmp_path: Path, write: Callable[[list[dict[str, Any]], Path], Path]
) -> None:
    def fingerprint(path: Path) -> str:
        with PromptFile(task(path)) as file:
            return file.fingerprint

    rows = [{"prompt": f"p{number}", "answer": number} for number in range(3)]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    path = write(rows, tmp_path / "one")
    copy = tmp_path / "copy" / path.name
    shutil.copytree(path.parent, copy.parent)
    assert fingerprint(copy) == fingerprint(path)
    assert fingerprint(write(rows[::-1], tmp_path / "other")) != fingerprint(path)
