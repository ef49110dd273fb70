"""Rollouts without a buffer."""

from collections.abc import Awaitable, Callable

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Prompt
from rollq.workers.agents.loops import Rollout, prompt_tokens
from rollq.workers.engines.protocol import Completion, Request, Tokenizer
from rollq.workers.groups.read_prompts import tokenizer_of
from rollq.workers.groups.task_settings import RolloutSettings
from rollq.workers.seeds import sample_seed

Generate = Callable[[Request], Awaitable[Completion]]


def rollout_of(
    task: str,
    settings: RolloutSettings,
    prompt: Prompt,
    index: int,
    seed: int,
    tokenizer: Tokenizer,
    generate: Generate,
) -> Rollout:
    """A rollout of sample `index` of a prompt, without a buffer."""
    tokenizer = tokenizer_of(tokenizer, settings.template_options)
    return Rollout(
        prompt=prompt,
        prompt_ids=prompt_tokens(prompt, tokenizer),
        previous=EMPTY_SAMPLE,
        sampling=settings.sampling(sample_seed(seed, task, prompt.row or 0, index, 0)),
        max_prompt_tokens=settings.max_prompt_tokens,
        priority=0,
        tokenizer=tokenizer,
        generate=generate,
        task=task,
        index=index,
    )
