"""Rollouts of a batch for the tables of trackers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollq.buffer.common import exact_json
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import Prompt
from rollq.consumer.batches.batch import Batch
from rollq.consumer.trackers.tracker import Rollout

MOST_CHARACTERS = 20_000
"""The most characters of a prompt or an answer: a table is not an archive."""


def sampled_rollouts(batch: Batch, count: int, seed: int) -> list[Rollout]:
    """At most `count` of this rank's samples, in the order of the batch. `seed` and the step decide the random draw, so
    the same batch always gives the same samples.
    """
    ages: dict[int, int] = {}
    for index in batch.share:
        sequence = batch.sequences[index]
        if not sequence.is_masked:
            ages[sequence.sample] = max(ages.get(sequence.sample, 0), int(sequence.staleness.max(initial=0)))
    samples = sorted(ages)
    chosen = np.random.default_rng([seed, batch.step]).choice(len(samples), min(count, len(samples)), replace=False)
    return [_rollout(batch, samples[place], ages[samples[place]]) for place in sorted(chosen)]


def _rollout(batch: Batch, index: int, staleness: int) -> Rollout:
    position, sample = int(batch.sample_groups[index]), batch.samples[index]
    first = int(np.searchsorted(batch.sample_groups, position))
    task, group_id = batch.group_ids[position]
    return Rollout(
        task=task_of(task),
        group=group_id,
        sample=index - first,
        prompt=_cut(_text(batch.groups[position].prompt)),
        text=_cut(sample.text),
        reward=float(batch.rewards[index]),
        parts=dict(sample.reward_parts),
        advantage=float(batch.advantages[index]),
        staleness=staleness,
        tokens=sample.response_tokens,
        finish_reason=sample.finish_reason.value if sample.finish_reason else "",
    )


def _text(prompt: Prompt) -> str:
    """A prompt as one string. In a conversation, each message follows its role."""
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n".join(f"{message.get('role', '')}: {_content(message)}" for message in prompt.content)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else exact_json.dumps(content, default=str).decode()


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"
