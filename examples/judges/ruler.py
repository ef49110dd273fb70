"""A group judge: a model scores all samples of a group in one call, each relative to the others (RULER)."""

import re
from collections.abc import Mapping, Sequence

from rollq.buffer import Prompt, Sample
from rollq.workers import ModelPool

ASK = """Score these {} answers to the task from 0 to 1, relative to each other: a better answer has a higher score, and
equally good answers have the same score. End with a line of scores, in the order of the answers, separated by commas.

Task: {}

{}"""


async def score(prompt: Prompt, samples: Sequence[Sample], pools: Mapping[str, ModelPool]) -> list[float]:
    answers = "\n\n".join(f"Answer {number}: {sample.text}" for number, sample in enumerate(samples, 1))
    question = ASK.format(len(samples), prompt.content, answers)
    said = await pools["grader"].chat([{"role": "user", "content": question}], temperature=0.0)
    scores = [float(number) for number in re.findall(r"\d*\.?\d+", said.strip().splitlines()[-1])]
    if len(scores) != len(samples) or max(scores) > 1:
        raise ValueError(f"{len(samples)} scores from 0 to 1 were asked for; the model ended with {said[-100:]!r}")
    return scores
