"""Runs of real roles that record what was trained, and recomputations of every token of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from support.waiting import PATIENCE_S

PER_TOKEN = ("ids", "loss_mask", "logprobs", "versions", "epochs", "staleness")


def rollq(*words: object) -> list[str]:
    return [sys.executable, "-m", "rollq.cli.main", *map(str, words)]


@contextmanager
def role(folder: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command of rollq in `folder`, whose output goes to a file there."""
    with process_in(folder, f"{words[0]}-{words[-1]}.log", rollq(*words)) as process:
        yield process


@contextmanager
def recorded_trainer(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`rollq train rollq.toml` in `folder`, which records and checks what it trains; see `benchmarks.recorder`."""
    command = [sys.executable, "-m", "benchmarks.recorder", "rollq.toml"]
    with process_in(folder, "train-rollq.toml.log", command) as process:
        yield process


@contextmanager
def process_in(folder: Path, log_name: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in `folder` that imports what this one may import, with its output in a file there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / log_name).open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@dataclass
class Recomputed:
    """What `recompute_all` saw: tokens checked, answers of several versions, the staleness that occurred."""

    tokens: int = 0
    mixed: int = 0
    ages: set[int] = field(default_factory=set)


def recompute_all(record: Path, tolerance: float) -> Recomputed:
    """Compare the logprob of every trained token with a plain forward pass under the weights that it claims."""
    seen = Recomputed()
    for path in sorted((record / "batches").iterdir()):
        arrays = load_file(path)
        for index, (start, end) in enumerate(zip(arrays["cu_seqlens"][:-1], arrays["cu_seqlens"][1:], strict=True)):
            sequence = {name: arrays[name][start:end] for name in PER_TOKEN}
            trained = sequence["loss_mask"]
            claimed = set(zip(sequence["epochs"].tolist(), sequence["versions"].tolist(), strict=True))
            made_by = {(e, v) for e, v in claimed if (trained & (sequence["versions"] == v)).any()}
            seen.mixed += len(made_by) > 1
            for epoch, version in made_by:
                where = trained & (sequence["versions"] == version) & (sequence["epochs"] == epoch)
                again = _recompute(record, epoch, version, sequence["ids"], arrays["temperature"][index])
                np.testing.assert_allclose(again[where[1:]], sequence["logprobs"][where], atol=tolerance, rtol=0)
                seen.tokens += int(where.sum())
            seen.ages |= set(sequence["staleness"][trained].tolist())
        assert arrays["loss_mask"].any()
    assert seen.tokens == sum(int(load_file(path)["loss_mask"].sum()) for path in (record / "batches").iterdir())
    return seen


def _recompute(record: Path, epoch: int, version: int, ids: Any, temperature: float) -> Any:
    """Logprobs of ids[1:] by a plain forward pass without cache or padding."""
    with torch.no_grad():
        logits = _weights_of(record, epoch, version)(torch.from_numpy(ids).long()[None]).logits[0, :-1] / float(
            temperature
        )
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[1:]).long()[:, None]).squeeze(-1).numpy()


@cache
def _weights_of(record: Path, epoch: int, version: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(record / "weights" / f"epoch-{epoch}-version-{version}").eval()
