"""The prompt files that ship with the package are what their script makes, and nothing held out is trained on."""

from pathlib import Path

import orjson
import pytest

from rollq.cli.data import make_prompts

FOLDER = Path(make_prompts.__file__).parent


def rows(name: str) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in (FOLDER / name).read_bytes().splitlines()]


def test_the_files_are_made_again_byte_for_byte() -> None:
    files = make_prompts.prompt_files()
    assert sorted(files) == sorted(path.name for path in FOLDER.glob("*.jsonl"))
    for name, content in files.items():
        assert (FOLDER / name).read_bytes() == content


@pytest.mark.parametrize("task", ["sum", "sort"])
def test_no_held_out_prompt_is_trained_on_and_none_comes_twice(task: str) -> None:
    train = [row["prompt"] for row in rows(f"{task}.jsonl")]
    heldout = [row["prompt"] for row in rows(f"{task}_heldout.jsonl")]
    assert len(train) >= 2000
    assert len(heldout) == 256
    assert len(set(train) | set(heldout)) == len(train) + len(heldout)


def test_every_answer_is_right() -> None:
    for row in rows("sum.jsonl") + rows("sum_heldout.jsonl"):
        first, second = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(first) + int(second)
    for row in rows("sort.jsonl") + rows("sort_heldout.jsonl"):
        digits = row["prompt"].removeprefix("sort ").removesuffix("=")
        assert list(row["answer"]) == sorted(digits)
