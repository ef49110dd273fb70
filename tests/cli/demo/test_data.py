"""The demo's prompts are the same bytes everywhere, and nothing held out is trained on."""

from hashlib import md5

import orjson
import pytest

from rollq.cli.demo.prompts import prompt_files

FILES = prompt_files()


def rows(name: str) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in FILES[name].splitlines()]


def test_the_same_code_gives_the_same_bytes() -> None:
    assert {name: md5(content).hexdigest() for name, content in FILES.items()} == {
        "sort.jsonl": "dbaad49160b3b43dcb1dd954c9232381",
        "sort_heldout.jsonl": "119fe9e28f67960f801899b906f143a7",
        "sum.jsonl": "e55950e55cd78ee44a0858ab02743bbd",
        "sum_heldout.jsonl": "659826759f1e0ddbfbc37d114c49b951",
    }


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
