"""Tokens per second of long answers in vLLM with their tokens salvaged, compared with the same answers without salvage.

Both sides share one vLLM and one server and take turns: each answers the same prompts with the same seeds, and puts the
groups. The salvaging side also has vLLM report the tokens, and keeps them in the buffer.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.generation import ENGINE_ARGS
from benchmarks.results import Result, ratios, take_turns
from benchmarks.throughput import ENVIRONMENT
from benchmarks.world import QUESTION, admit_and_lease, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Lease, Sample
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.protocol import Engine, Sampling
from rollq.workers.engines.registry import make_engine
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.salvage import Salvage
from rollq.workers.tokenizers.hugging_face import HfTokenizer

GROUPS, GROUP_SIZE = 8, 8


def measure(quick: bool) -> list[Result]:
    """One result: the tokens per second of salvaging turns, divided by the rate of the turns before or after them."""
    os.environ.update(ENVIRONMENT)
    tokens, repetitions = (384, 2) if quick else (512, 6)
    rules = TaskRules(batch_groups=GROUPS, group_size=GROUP_SIZE, partial_rollout=True, max_staleness=1000)
    with TemporaryDirectory(prefix="rollq-bench-") as name, server() as redis:
        write_model(Path(name))
        with run(redis.url, "salvage", rules) as (buffer, held), asyncio.Runner() as runner:
            side = Side(buffer, held.epoch, Path(name), tokens)
            runner.run(side.start())
            without, salvaging = take_turns(
                repetitions,
                lambda: runner.run(side.turn(salvages=False)),
                lambda: runner.run(side.turn(salvages=True)),
            )
            runner.run(side.engine.close())
    return [
        Result(
            name="salvage",
            what=f"vLLM with its tokens salvaged over without, {GROUPS * GROUP_SIZE} answers of {tokens} tokens",
            unit="share",
            target=0.97,
            better="higher",
            values=ratios(salvaging, without),
            details={
                "tokens_per_s": float(np.median(without)),
                "salvaging_tokens_per_s": float(np.median(salvaging)),
            },
        )
    ]


def write_model(folder: Path) -> None:
    """Write a small model without an end token, so that every answer has all its tokens."""
    from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save  # torch: most benchmarks do without

    model = make_model(258, 0, head_dim=32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    save(folder, model, tokenizer)


class Side:
    """Answers prompts with vLLM, salvaging or not. `engine` is shared."""

    def __init__(self, buffer: Buffer, epoch: int, model: Path, tokens: int) -> None:
        options = {"model": model, "dtype": "float32", "engine_args": ENGINE_ARGS}
        self.engine: Engine = make_engine("vllm", options)
        self._calls = BufferCalls(buffer)
        self._epoch = epoch
        self._tokenizer = HfTokenizer(model)
        self._tokens = tokens
        self._cursors = count(0, GROUPS)

    async def start(self) -> None:
        """Load the model, and warm up."""
        await self.engine.start()
        await self.turn(salvages=True)

    async def turn(self, *, salvages: bool) -> float:
        """Generate and put `GROUPS` groups; returns tokens per second."""
        buffer = self._calls.buffer
        assert isinstance(buffer, Buffer)
        leases = admit_and_lease(buffer, self._epoch, next(self._cursors), GROUPS, 0)
        started_s = time.monotonic()
        salvage = Salvage(self._calls) if salvages else None
        groups = await asyncio.gather(*(self._group(lease, salvage) for lease in leases))
        await self._calls(buffer.put, results_of(leases, groups))
        took_s = time.monotonic() - started_s
        made = sum(sample.response_tokens for group in groups for sample in group)
        if made != GROUPS * GROUP_SIZE * self._tokens:
            raise RuntimeError(f"{made} tokens were made, which is not all")
        return made / took_s

    async def _group(self, lease: Lease, salvage: Salvage | None) -> Sequence[Sample]:
        held = HeldLease(lease, 0.0, 0.0)
        samples = await asyncio.gather(*(self._sample(held, index, salvage) for index in range(GROUP_SIZE)))
        if salvage is not None and held.parts < GROUP_SIZE * (self._tokens // 256):
            raise RuntimeError(f"only {held.parts} parts were salvaged")
        return samples

    async def _sample(self, held: HeldLease, index: int, salvage: Salvage | None) -> Sample:
        rollout = Rollout(
            prompt=held.lease.prompt,
            prompt_ids=np.array(self._tokenizer.encode(QUESTION.format(index)), np.int32),
            previous=EMPTY_SAMPLE,
            sampling=Sampling(self._tokens, 1.0, seed=index),
            max_prompt_tokens=1024,
            priority=0,
            tokenizer=self._tokenizer,
            generate=self.engine.generate,
            keep=None if salvage is None else salvage.of(held, index, EMPTY_SAMPLE).keep,
        )
        return replace(await SingleTurn().run(rollout), reward=1.0)
