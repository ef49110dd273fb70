"""Real workers, real swaps: every trained token has the logprob of the weights that it claims.

It finds wrong offsets, masks, temperatures, version stamps and caches that outlive a swap. The weights move far at
every step, and answers are long enough that swaps come in their middle.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rollq.buffer.server import EmbeddedServer

STEPS = 8
PER_TOKEN = ("ids", "loss_mask", "logprobs", "versions", "epochs", "staleness")
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
EDITS = {
    "batch_groups = 16": "batch_groups = 4",
    "max_tokens = 8": "max_tokens = 40",
    'judge = "exact_match"': 'judge = "parity_judge.reward"\nmax_prompt_tokens = 64\ntemperature = 0.7\n'
    'stragglers = "expire"',  # batches that wait for nobody: the next weights come in the middle of answers
    'layout = "padded"': 'record_dir = "record"\nverify_logprobs = 1e-4',
    # A batch then takes many rounds, so that it outlasts a train step, however slow the machine is.
    "[worker.options]": "[worker.options]\nmax_batch = 4",
    "learning_rate = 0.0005": "learning_rate = 0.01",
}


def rollq(*words: object) -> list[str]:
    return [sys.executable, "-m", "rollq.cli.main", *map(str, words)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo's folder with a model that knows nothing, and a judge that rewards what can be learnt from anything."""
    folder = tmp_path_factory.mktemp("logprobs") / "demo"
    options = ("--prepare", "--warm-up-steps", 1, "--steps", STEPS, "--out", folder)
    subprocess.run(rollq("demo", *options), check=True, capture_output=True)
    config = folder / "rollq.toml"
    text = config.read_text("utf-8")
    for old, new in EDITS.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    config.write_text(text, "utf-8")
    (folder / "parity_judge.py").write_text(JUDGE, "utf-8")
    return folder


@contextmanager
def role(folder: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{words[0]}-{words[-1]}.log").open("wb") as log:
        process = subprocess.Popen(rollq(*words), cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def test_every_token_that_real_workers_made_has_the_logprob_of_the_weights_that_it_claims(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        roles.enter_context(role(prepared, "produce", "rollq.toml"))
        for name in ("one", "two"):
            roles.enter_context(role(prepared, "work", "rollq.toml", "--name", name))
        trainer = roles.enter_context(role(prepared, "train", "rollq.toml"))
        assert trainer.wait(150) == 0, (prepared / "train-rollq.toml.log").read_text()

    checked, mixed, ages = 0, 0, set()
    batches = sorted((prepared / "record" / "batches").iterdir())
    assert len(batches) == STEPS
    for path in batches:
        arrays = load_file(path)
        for index, (start, end) in enumerate(zip(arrays["cu_seqlens"][:-1], arrays["cu_seqlens"][1:], strict=True)):
            sequence = {name: arrays[name][start:end] for name in PER_TOKEN}
            claimed = set(zip(sequence["epochs"].tolist(), sequence["versions"].tolist(), strict=True))
            made_by = {(e, v) for e, v in claimed if (sequence["loss_mask"] & (sequence["versions"] == v)).any()}
            mixed += len(made_by) > 1
            for epoch, version in made_by:
                where = sequence["loss_mask"] & (sequence["versions"] == version) & (sequence["epochs"] == epoch)
                again = recompute(prepared / "record", epoch, version, sequence["ids"], arrays["temperature"][index])
                np.testing.assert_allclose(again[where[1:]], sequence["logprobs"][where], atol=1e-4, rtol=0)
                checked += int(where.sum())
            ages |= set(sequence["staleness"][sequence["loss_mask"]].tolist())
        assert sequence["loss_mask"].any()
    assert checked == sum(int(load_file(path)["loss_mask"].sum()) for path in batches)
    assert ages == {0, 1}
    assert mixed > 0, "no swap came in the middle of an answer"


def recompute(record: Path, epoch: int, version: int, ids: Any, temperature: float) -> Any:
    """Logprobs of ids[1:] by a plain forward pass without cache or padding."""
    with torch.no_grad():
        logits = weights_of(record, epoch, version)(torch.from_numpy(ids).long()[None]).logits[0, :-1] / float(
            temperature
        )
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[1:]).long()[:, None]).squeeze(-1).numpy()


@cache
def weights_of(record: Path, epoch: int, version: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(record / "weights" / f"epoch-{epoch}-version-{version}").eval()
