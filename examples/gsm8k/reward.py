"""The reward of a GSM8K answer: 1 for the right number, and 0.1 more when it stands where it was asked for."""

from rollq.buffer import Prompt, Sample
from rollq.workers import match_math


def reward(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Named parts that add up; a reference without a number raises, and its samples fail."""
    return {
        "right": match_math(sample.text, prompt.answer),
        "format": 0.1 * float("\\boxed{" in sample.text),
    }
