"""The reward of a GSM8K answer: 1 for the right number, plus 0.1 if the answer uses the requested format."""

from rollq.buffer import Prompt, Sample
from rollq.workers import match_math


def reward(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return the parts of the reward, which are added up. Samples fail if the reference answer has no number."""
    return {
        "right": match_math(sample.text, prompt.answer),
        "format": 0.1 * float("\\boxed{" in sample.text),
    }
