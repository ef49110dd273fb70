"""The demo's prompts are the same bytes everywhere, and nothing held out is trained on."""

from hashlib import md5

import orjson
import pytest

from rollq.cli.demo.prompts import digit_sum_files, prompt_files

FILES = {**prompt_files(), **digit_sum_files()}


def rows(name: str) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in FILES[name].splitlines()]


def test_the_same_code_gives_the_same_bytes() -> None:
    assert {name: md5(content).hexdigest() for name, content in FILES.items()} == {
        "digits.jsonl": "e02c7d893451e06b4d4f948b665435cd",
        "digits_heldout.jsonl": "658c7e8dfe2755259b3fe62c96d3bf2e",
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


def terms(row: dict[str, str]) -> tuple[int, int]:
    example = "Question: What is 2 + 3?\nAnswer: 5\n\nQuestion: What is "
    first, second = row["prompt"].removeprefix(example).removesuffix("?\nAnswer:").split(" + ")
    return int(first), int(second)


def test_the_sums_of_two_digits_are_split_so_that_no_twin_of_a_held_out_sum_is_trained_on() -> None:
    train = [terms(row) for row in rows("digits.jsonl")]
    heldout = [terms(row) for row in rows("digits_heldout.jsonl")]
    assert sorted(train + heldout) == [(a, b) for a in range(10) for b in range(10) if {a, b} != {2, 3}]
    unordered = {tuple(sorted(pair)) for pair in heldout}
    assert len(unordered) == 20
    assert not unordered & {tuple(sorted(pair)) for pair in train}
    for row in rows("digits.jsonl") + rows("digits_heldout.jsonl"):
        assert int(row["answer"]) == sum(terms(row))
