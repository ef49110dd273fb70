"""A worker in a few lines, for the consumer's tests: it samples one token at a time from the live weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.errors import StaleWorker
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    FinishReason,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.weights.loading import load_weights
from support.consumer_groups import VOCABULARY

TEMPERATURE = 0.7
RESPONSE = 5


def make_run(buffer: Buffer, tasks: Sequence[str] = ("math",), **rules: object) -> None:
    """A run with tasks of two groups of four samples a batch."""
    buffer.create_run()
    for task in tasks:
        buffer.register_task(task, TaskRules.model_validate({"batch_groups": 2, "group_size": 4, **rules}))


class HandWorker:
    """Fills the buffer on demand, from `model` with the live weights. `says` is the temperature that it reports."""

    def __init__(
        self, buffer: Buffer, model: Qwen3ForCausalLM, folder: Path, name: str = "hand", says: float = TEMPERATURE
    ) -> None:
        self.buffer = buffer
        self.model = model
        self.folder = folder
        self.name = name
        self.says = says
        self.live: LiveModel | None = None

    def produce(self, groups: int, task: str = "math", *, follow: bool = True) -> None:
        """Take `groups` new prompts all the way to completed. Without `follow`, from the weights of the last call."""
        if follow or self.live is None:
            self.swap()
        self._admit(groups, task)
        try:
            leases = self._lease(groups, task)
        except StaleWorker:  # the trainer has moved on meanwhile
            self.swap()
            leases = self._lease(groups, task)
        self.buffer.put(
            [GroupResult(lease, tuple(self._sample(lease.group_id, i) for i in range(4))) for lease in leases]
        )

    def _admit(self, groups: int, task: str) -> None:
        clock, cursor = self.buffer.clock(task), int(self.buffer.counts(task).progress["cursor"])
        prompts = [(Prompt(f"prompt {cursor + index}"), cursor + index + 1) for index in range(groups)]
        self.buffer.admit(task, prompts, epoch=clock.epoch, cursor=cursor, target=1_000_000, step=clock.step)

    def _lease(self, groups: int, task: str) -> Sequence[Lease]:
        assert self.live is not None
        return self.buffer.lease(
            [task], groups, worker=self.name, version=self.live.version, epoch=self.live.epoch
        ).leases

    def swap(self) -> None:
        live = self.buffer.live_model()
        assert live is not None
        if live != self.live:
            folder = load_weights(self.buffer, live.uri, live.digest, self.folder)
            self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            self.live = live

    @torch.no_grad()
    def _sample(self, group_id: int, index: int) -> Sample:
        """The reward is the share of even tokens."""
        assert self.live is not None
        generator = torch.Generator().manual_seed(group_id * 1000 + index)
        prompt = torch.randint(0, VOCABULARY, (1 + group_id % 4,), generator=generator)
        ids, logprobs = prompt, []
        for _ in range(RESPONSE):
            distribution = (self.model(ids[None]).logits[0, -1] / TEMPERATURE).log_softmax(-1)
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs.append(float(distribution[token]))
            ids = torch.cat([ids, token])
        response = ids[len(prompt) :].numpy().astype(np.int32)
        segment = Segment(
            prompt_ids=prompt.numpy().astype(np.int32),
            response_ids=response,
            logprobs=np.array(logprobs, np.float32),
            versions=(VersionSpan(self.live.epoch, self.live.version, RESPONSE),),
        )
        return Sample(
            segments=(segment,),
            status=SampleStatus.COMPLETED,
            finish_reason=FinishReason.LENGTH,
            reward=float((response % 2 == 0).mean()),
            sampling={"temperature": self.says},
            extra={"worker": self.name},
        )


class StepwiseWorker(HandWorker):
    """Finishes groups when it is told to."""

    def begin(self, groups: int, task: str = "math") -> list[Lease]:
        """Take new prompts, and lease them; in the order of their ids."""
        self.swap()
        self._admit(groups, task)
        return sorted(self._lease(groups, task), key=lambda lease: lease.group_id)

    def finish(self, leases: Sequence[Lease]) -> None:
        """Put these groups, one after the other. One sample of every other group fails: their counts differ."""
        for lease in leases:
            samples = [self._sample(lease.group_id, index) for index in range(4)]
            if lease.group_id % 2:
                why = "for the test"
                failed = replace(samples[0], status=SampleStatus.FAILED, error=why, failure=FailureKind.GRADER)
                samples[0] = replace(failed, reward=None)
            self.buffer.put([GroupResult(lease, tuple(samples))])
