"""Reward on held-out prompts, by what workers use: sampled by their engine, at temperature 1, and judged by the judge.
Needs torch."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.rollouts import EMPTY_SAMPLE, Prompt
from rollq.cli.settings import TaskSettings
from rollq.producer.prompts import PromptFile
from rollq.workers.agents.loops import Rollout, SingleTurn, prompt_tokens
from rollq.workers.engines.protocol import Engine, Sampling
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.judging.judges import JudgeContext, make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict
from rollq.workers.seeds import sample_seed
from rollq.workers.tokenizers.hugging_face import HfTokenizer

SAMPLES = 4
JUDGE_TIMEOUT_S = 10.0
MAX_BATCH = 256


def held_out_rewards(model: Path, tasks: Mapping[str, TaskSettings], seed: int) -> dict[str, float]:
    """Mean reward per task over `SAMPLES` samples of each prompt in `tasks[name].prompts`.

    The same weights and seed give the same rewards. Lines that are no prompts, and samples that cannot be judged,
    are left out. Raises `ConfigError` when `model` is no model folder.
    """
    return asyncio.run(_rewards(model, tasks, seed))


async def _rewards(model: Path, tasks: Mapping[str, TaskSettings], seed: int) -> dict[str, float]:
    engine = TransformersEngine(TransformersSettings(model=model, device="cpu", max_batch=MAX_BATCH))
    tokenizer = HfTokenizer(model)
    await engine.start()
    try:
        return {name: await _reward(name, task, engine, tokenizer, seed) for name, task in tasks.items()}
    finally:
        await engine.close()


async def _reward(name: str, task: TaskSettings, engine: Engine, tokenizer: HfTokenizer, seed: int) -> float:
    processes = JudgePool(1)
    judge = make_judge(task.judge, task.judge_options, JudgeContext(JUDGE_TIMEOUT_S, processes))

    async def judged(prompt: Prompt, row: int, index: int) -> Verdict:
        rollout = Rollout(
            prompt=prompt,
            prompt_ids=prompt_tokens(prompt, tokenizer),
            previous=EMPTY_SAMPLE,
            sampling=Sampling(max_tokens=task.max_tokens, seed=sample_seed(seed, name, row, index, 0)),
            max_prompt_tokens=task.max_prompt_tokens,
            priority=0,
            tokenizer=tokenizer,
            generate=engine.generate,
        )
        return await judge.judge(prompt, await SingleTurn().run(rollout))

    prompts = _prompts(task)
    try:
        verdicts = await asyncio.gather(*(judged(prompts[row], row, n) for row in prompts for n in range(SAMPLES)))
    finally:
        await judge.close()
        await processes.close()
    rewards = [each.reward for each in verdicts if each.reward is not None]
    return sum(rewards) / max(1, len(rewards))


def _prompts(task: TaskSettings) -> dict[int, Prompt]:
    """The rows that are prompts, by number."""
    prompts = {}
    with PromptFile(task) as file:
        for row in range(file.rows):
            try:
                prompts[row] = file.prompt(row)
            except InvalidPrompt:
                continue  # the producer tells of the like
    return prompts
