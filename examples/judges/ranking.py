"""A group judge: a model compares every pair of samples, in both orders."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import permutations

from rollq.buffer import Prompt, Sample
from rollq.workers import ModelPool

ASK = "Which answer is better? End with 1 or 2.\n\n{}\n\nAnswer 1: {}\n\nAnswer 2: {}"


async def rank(prompt: Prompt, samples: Sequence[Sample], pools: Mapping[str, ModelPool]) -> list[float]:
    wins = [0] * len(samples)

    async def compare(pair: tuple[int, int]) -> None:
        question = ASK.format(prompt.content, *(samples[index].text for index in pair))
        said = await pools["grader"].chat([{"role": "user", "content": question}], temperature=0.0)
        wins[pair["12".index(said.strip()[-1])]] += 1

    await asyncio.gather(*map(compare, permutations(range(len(samples)), 2)))
    return [won / max(2 * len(samples) - 2, 1) for won in wins]
