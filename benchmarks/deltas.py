"""`python -m benchmarks.deltas MODEL PROMPTS`: the size and the cost of a delta after a step of a real model.

MODEL is a Hugging Face folder, PROMPTS a file of JSON Lines with "question" and "answer". Each row is one step of AdamW
on four prompts, with float32 weights in the trainer, published in bfloat16 or float32.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import orjson
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollq.buffer.weights.delta import apply_delta, encode_delta
from rollq.monitor.text.tables import aligned

PROMPTS = 4
STEPS = (1, 2)
"""The steps after which a delta is made."""
RATES = (1e-6, 1e-5)
DIGESTS = "0" * 64, "1" * 64
COLUMNS = ["published in", "learning rate", "step", "bytes changed", "delta", "of all bytes", "encode", "apply"]


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.argument("prompts", type=click.Path(path_type=Path, exists=True))
def main(model: Path, prompts: Path) -> None:
    rows = [row for rate in RATES for row in measure(model, prompts, rate)]
    click.echo("\n".join(aligned([COLUMNS, *rows])))


def measure(folder: Path, prompts: Path, rate: float) -> Iterator[list[str]]:
    """The rows of one learning rate."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    batches = _batches(folder, prompts)
    for step in range(1, max(STEPS) + 1):
        before = {dtype: _published(model, dtype) for dtype in (torch.bfloat16, torch.float32) if step in STEPS}
        for ids in next(batches):
            (model(input_ids=ids, labels=ids).loss / PROMPTS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for dtype, base in before.items():
            yield [str(dtype).removeprefix("torch."), f"{rate:g}", str(step), *_compare(base, _published(model, dtype))]


def _batches(folder: Path, prompts: Path) -> Iterator[list[torch.Tensor]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [orjson.loads(line) for line in prompts.read_bytes().splitlines()[: PROMPTS * max(STEPS)]]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    for start in range(0, len(texts), PROMPTS):
        yield [tokenizer(text, return_tensors="pt").input_ids for text in texts[start : start + PROMPTS]]


def _published(model: Any, dtype: torch.dtype) -> bytes:
    return save({name: tensor.to(dtype) for name, tensor in model.named_parameters()})


def _compare(base: bytes, result: bytes) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        weights, delta = Path(name) / "weights", Path(name) / "delta"
        weights.write_bytes(base)
        started_s = perf_counter()
        with delta.open("wb") as file:
            encode_delta([base], [result], DIGESTS, file)
        encoded_s = perf_counter()
        apply_delta([weights], delta, *DIGESTS)
        applied_s = perf_counter()
        assert weights.read_bytes() == result
        size = delta.stat().st_size
    changed = np.count_nonzero(np.frombuffer(base, np.uint8) != np.frombuffer(result, np.uint8))
    return [
        f"{changed / len(base):.2%}",
        f"{size / 1e6:.1f} MB",
        f"{size / len(base):.2%}",
        f"{encoded_s - started_s:.1f} s",
        f"{applied_s - encoded_s:.1f} s",
    ]


if __name__ == "__main__":
    main()
