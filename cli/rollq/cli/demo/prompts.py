"""The demo's prompts: two tasks whose answers can be checked. Every call gives the same bytes.

`sum` asks for the sum of two two-digit numbers ("12+34=", "46"), `sort` for four digits in ascending order
("sort 3142=", "1234"). No held-out prompt is trained on.
"""

import random
from collections.abc import Iterator

import orjson

SEED = 7
HELDOUT_PROMPTS = 256
# Sums are harder to learn than sorting: all but the held-out ones are used.
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
