"""Trainings with TRL for tests: a run of inserted groups, a config, and a training in this process or in ranks."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import FinishedGroup, Prompt
from rollq.consumer import Consumer
from rollq.integrations import trl
from support.consumer_groups import VOCABULARY
from support.finished_groups import finished_sample
from support.forked_ranks import run_in_ranks
from support.tiny_qwen3 import tiny_qwen3

if TYPE_CHECKING:  # takes seconds to import, in every test process
    from trl import GRPOConfig

NORMS = "norms.json"
STEPS = 5
GROUPS = 3


def save_model(folder: Path) -> Path:
    """The tiny model, with a tokenizer of one word per token."""
    tiny_qwen3().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder


def config(output: Path, **changed: Any) -> "GRPOConfig":
    """Settings of a short training on the CPU."""
    from trl import GRPOConfig

    values: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    return GRPOConfig(str(output), **{**values, **changed})


def insert_groups(buffer: Buffer, steps: int = STEPS, **rules: Any) -> None:
    """A run whose batches are known beforehand: groups of ragged samples, for `steps` batches of three groups."""
    buffer.create_run()
    buffer.register_task("demos", TaskRules(batch_groups=GROUPS, group_size=4, offline=True, **rules))
    rng = np.random.default_rng(0)

    def sample() -> Any:
        response = rng.integers(2, VOCABULARY, rng.integers(2, 12))
        logprobs = rng.normal(-3.4, 0.3, len(response))
        return finished_sample(float(rng.random()), response=response.tolist(), logprobs=logprobs.tolist())

    groups = [FinishedGroup(Prompt(str(n)), tuple(sample() for _ in range(4))) for n in range(steps * GROUPS)]
    buffer.insert("demos", groups, source="made")


class Norms(TrainerCallback):
    """Keeps the gradient norm of each step, and kills the process in the middle of a step."""

    def __init__(self, killed_after: int | None = None) -> None:
        self.by_step: dict[str, float] = {}
        self._killed_after = killed_after

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if (norm := given["logs"].get("grad_norm")) is not None:
            self.by_step[str(state.global_step)] = norm

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train(model: Path, args: "GRPOConfig", consumer: Consumer, norms: Norms, *, max_tokens: int = 400) -> Any:
    """Train with an open consumer, and return the model."""
    trainer = trl.RollqGRPOTrainer(str(model), args, consumer, max_tokens=max_tokens, callbacks=[norms])
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


def train_in_ranks(
    url: str,
    run: str,
    model: Path,
    output: Path,
    ranks: int,
    *,
    killed_after: int | None = None,
    ends: Sequence[int] | None = None,
    **changed: Any,
) -> dict[str, float]:
    """Train in as many processes, and return the gradient norm of each step. After step `killed_after`, all are killed.
    `ends` are the expected exit codes of the ranks, if they differ.
    """
    codes = run_in_ranks(ranks, _train_rank, url, run, model, output, killed_after, changed)
    wanted = ends or [0 if killed_after is None else -signal.SIGKILL] * ranks
    assert codes == list(wanted)
    if any(wanted):
        return {}
    norms: dict[str, float] = orjson.loads((output / NORMS).read_bytes())
    return norms


def _train_rank(
    url: str, run: str, model: Path, output: Path, killed_after: int | None, changed: Mapping[str, Any]
) -> None:
    args, norms = config(output, **changed), Norms(killed_after)
    with trl.connect(url, run=run, model=model, args=args) as consumer:
        train(model, args, consumer, norms)
    if args.process_index == 0:
        (output / NORMS).write_bytes(orjson.dumps(norms.by_step))
