"""Reward on held-out prompts, measured with the workers' engine and judges. Needs torch."""

from collections.abc import Mapping
from pathlib import Path

from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.values.rollouts import Prompt
from rollq.cli.demo.mean_rewards import mean_rewards
from rollq.cli.settings.task_settings import EvaluationSettings
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import PromptSettings

SAMPLES = 4


def held_out_rewards(
    model: Path, evaluations: Mapping[str, EvaluationSettings], seed: int, device: str = "cpu"
) -> dict[str, float]:
    """Mean reward per evaluation over `SAMPLES` samples of each of its prompts; the same seed gives the same rewards.

    Omits rows that are not prompts. Raises `ConfigError` when `model` is not a model folder.
    """
    prompts = {name: (settings, read_prompts(settings)) for name, settings in evaluations.items()}
    return mean_rewards(model, prompts, samples=SAMPLES, seed=seed, device=device)


def read_prompts(settings: PromptSettings) -> list[Prompt]:
    """The prompts in a file's rows."""
    prompts = []
    with PromptFile(settings) as file:
        for row in range(file.rows):
            try:
                prompts.append(file.prompt(row))
            except InvalidPrompt:
                continue  # the producer logs such rows
    return prompts
