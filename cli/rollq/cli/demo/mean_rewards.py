"""A model's mean reward on given prompts, without a buffer, from the workers' engine and judges.

Needs torch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.loops import AgentLoop, Rollout
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.groups.lone_rollouts import rollout_of
from rollq.workers.groups.task_settings import RolloutSettings
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.task_judge import make_task_judge
from rollq.workers.tokenizers.hugging_face import HfTokenizer

JUDGE_TIMEOUT_S = 10.0
MAX_BATCH = 256

PromptSet = tuple[RolloutSettings, Sequence[Prompt]]


def mean_rewards(
    model: Path, prompts: Mapping[str, PromptSet], *, samples: int, seed: int, device: str = "cpu"
) -> dict[str, float]:
    """Mean reward per task over `samples` samples of each prompt, drawn with the task's settings.

    On one device, the same weights and seed give the same rewards. Samples that cannot be judged are left out; without
    judged samples, the mean is 0. Raises `ConfigError` when `model` is not a model folder.
    """
    return asyncio.run(_mean_rewards(model, prompts, samples, seed, device))


async def _mean_rewards(
    model: Path, prompts: Mapping[str, PromptSet], samples: int, seed: int, device: str
) -> dict[str, float]:
    engine = TransformersEngine(TransformersSettings(model=model, device=device, max_batch=MAX_BATCH))
    sampler = _Sampler(engine, HfTokenizer(model), samples, seed)
    await engine.start()
    try:
        return {task: await sampler.mean_reward(task, *prompt_set) for task, prompt_set in prompts.items()}
    finally:
        await engine.close()


class _Sampler:
    """Draws and judges the samples of one model."""

    def __init__(self, engine: TransformersEngine, tokenizer: HfTokenizer, samples: int, seed: int) -> None:
        self._made_by = tokenizer, engine.generate
        self._samples = samples
        self._seed = seed

    async def mean_reward(self, task: str, settings: RolloutSettings, prompts: Sequence[Prompt]) -> float:
        processes = JudgePool(1)
        loop = make_loop(settings.agent_loop, settings.agent_options)
        judge = make_task_judge(settings.judge, settings.judge_options, JudgeContext(JUDGE_TIMEOUT_S, processes))
        try:
            judged = await asyncio.gather(
                *(
                    self._reward(loop, judge, rollout_of(task, settings, prompt, index, self._seed, *self._made_by))
                    for prompt in prompts
                    for index in range(self._samples)
                )
            )
        finally:
            await judge.close()
            await processes.close()
        rewards = [reward for reward in judged if reward is not None]
        return sum(rewards) / max(1, len(rewards))

    async def _reward(self, loop: AgentLoop, judge: Judge, rollout: Rollout) -> float | None:
        verdict = await judge.judge(rollout.prompt, await loop.run(rollout))
        return verdict.reward
