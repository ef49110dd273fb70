"""The demo's prompts: tasks whose answers can be checked. Every call gives the same bytes.

For the tiny model, `sum` asks for the sum of two two-digit numbers ("12+34=", "46"), and `sort` for four digits in
ascending order ("sort 3142=", "1234"). For SmolLM2, `digits` asks for the sum of two digits, after one solved example.
No held-out prompt is trained on, nor is the same sum in the other order for `digits`.
"""

import random
from collections.abc import Iterator, Sequence

import orjson

SEED = 7
HELDOUT_PROMPTS = 256
# Sums are harder to learn than sorting: all except the held-out sums are used.
TRAIN_PROMPTS = {"sum": 8100 - HELDOUT_PROMPTS, "sort": 4000}


def all_sums() -> Iterator[tuple[str, str]]:
    """Every (prompt, answer) of two two-digit numbers: 8,100 pairs."""
    for a in range(10, 100):
        for b in range(10, 100):
            yield f"{a}+{b}=", str(a + b)


def all_sorts() -> Iterator[tuple[str, str]]:
    """Every (prompt, answer) of four digits: 10,000 pairs."""
    for number in range(10_000):
        digits = f"{number:04d}"
        yield f"sort {digits}=", "".join(sorted(digits))


TASKS = {"sum": all_sums, "sort": all_sorts}


def prompt_files() -> dict[str, bytes]:
    """Content of every prompt file, by file name."""
    files = {}
    for task, questions in TASKS.items():
        rows = [orjson.dumps({"prompt": prompt, "answer": answer}) + b"\n" for prompt, answer in questions()]
        random.Random(f"{SEED} {task}").shuffle(rows)
        files[f"{task}_heldout.jsonl"] = b"".join(rows[:HELDOUT_PROMPTS])
        files[f"{task}.jsonl"] = b"".join(rows[HELDOUT_PROMPTS : HELDOUT_PROMPTS + TRAIN_PROMPTS[task]])
    return files


HELDOUT_PAIRS = 20
EXAMPLE = (2, 3)
"""The digits of the solved example, whose sum is not asked for."""


def digit_sum_files() -> dict[str, bytes]:
    """Content of the prompt files of `digits`, by file name: the 98 sums of two digits other than the example. Of the
    54 unordered pairs, `HELDOUT_PAIRS` are held out, each in both orders.
    """
    pairs = [(a, b) for a in range(10) for b in range(a, 10) if (a, b) != EXAMPLE]
    random.Random(f"{SEED} digits").shuffle(pairs)
    return {
        "digits_heldout.jsonl": _digit_sums(pairs[:HELDOUT_PAIRS]),
        "digits.jsonl": _digit_sums(pairs[HELDOUT_PAIRS:]),
    }


def _digit_sums(pairs: Sequence[tuple[int, int]]) -> bytes:
    """The rows of unordered pairs: each pair in both orders, or one row if these are the same."""
    example = f"{_question(*EXAMPLE)} {sum(EXAMPLE)}\n\n"
    ordered = [order for a, b in pairs for order in sorted({(a, b), (b, a)})]
    return b"".join(
        orjson.dumps({"prompt": example + _question(a, b), "answer": str(a + b)}) + b"\n" for a, b in ordered
    )


def _question(a: int, b: int) -> str:
    return f"Question: What is {a} + {b}?\nAnswer:"
