"""Conversations of several turns in tests: a real tokenizer with a chat template, and a model with given words."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, FinishReason, Prompt, Sample, VersionSpan
from rollq.cli.demo.tiny_model import make_tokenizer
from rollq.workers.agents.loops import AgentLoop, Rollout, prompt_tokens
from rollq.workers.engines.protocol import Completion, Request, Sampling
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.waiting import PATIENCE_S

PLAIN = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Appends only, and ends every turn with the token with which the model ends it."""
FORGETFUL = PLAIN.replace(
    "{{ message.content }}",
    "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}",
)
"""Drops the thoughts of earlier turns, as templates of thinking models do."""
PAD, EOS = 0, 1


def chat_tokenizer(folder: Path, template: str = PLAIN) -> HfTokenizer:
    """A byte-level tokenizer with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return HfTokenizer(folder)


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f"<tool_call>\n{orjson.dumps({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


@dataclass
class Model:
    """Says its words, one entry per turn, of weights whose version counts up with the turns.

    An entry may also be the ids of a turn, or the finish reason of one without tokens.
    """

    tokenizer: HfTokenizer
    words: Sequence[str | Sequence[int] | FinishReason]
    requests: list[Request] = field(default_factory=list)
    arrays: bool = False

    async def generate(self, request: Request) -> Completion:
        turn = len(self.requests)
        self.requests.append(request)
        said = self.words[turn]
        if isinstance(said, FinishReason):
            return self.completion([], said, turn)
        ids = [*self.tokenizer.encode(said), EOS] if isinstance(said, str) else said
        if len(ids) > request.sampling.max_tokens:
            return self.completion(ids[: request.sampling.max_tokens], FinishReason.LENGTH, turn)
        return self.completion(ids, FinishReason.STOP, turn)

    def completion(self, ids: Sequence[int], reason: FinishReason, version: int) -> Completion:
        return Completion(
            np.array(ids, np.int32),
            np.full(len(ids), -0.25, np.float32),
            (VersionSpan(1, version, len(ids)),) if ids else (),
            reason,
            {"routed": np.full((len(ids), 2), 7, np.uint8)} if self.arrays else {},
        )


def rollout(model: Model, prompt: Prompt, *, max_tokens: int = 1000, max_prompt_tokens: int = 1000) -> Rollout:
    return Rollout(
        prompt=prompt,
        prompt_ids=prompt_tokens(prompt, model.tokenizer),
        previous=EMPTY_SAMPLE,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.7, seed=5),
        max_prompt_tokens=max_prompt_tokens,
        priority=3,
        tokenizer=model.tokenizer,
        generate=model.generate,
        session="math/1/0/1",
    )


def converse(loop: AgentLoop, model: Model, prompt: Prompt | None = None, **limits: int) -> Sample:
    """The sample that a loop makes of what a model says."""
    making = loop.run(rollout(model, prompt or Prompt("6*7?"), **limits))
    return asyncio.run(asyncio.wait_for(making, PATIENCE_S))
