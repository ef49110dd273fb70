"""What a demo is asked for, and the `rollq.toml` that follows from it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollq.cli.demo.files import DemoFolder, DemoTask

RUN = "demo"
GROUP_SIZE = 8
LEARNING_RATE = 5e-4
LEASE_S = 5.0  # a killed worker's groups are taken over this soon


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for. `minutes` bounds the whole demo."""

    out: Path
    steps: int
    minutes: float
    seed: int
    prompts: Path | None
    prompt_field: str
    answer_field: str
    max_staleness: int
    strategy: str
    partial_rollout: bool
    shuffle_rewards: bool
    warm_up_steps: int
    workers: int
    live: bool


def demo_settings(options: DemoOptions, folder: DemoFolder, tasks: Sequence[DemoTask], url: str) -> dict[str, Any]:
    """The content of the demo's `rollq.toml`; its paths are relative, so that the folder can be moved."""

    def inside(path: Path) -> str:
        return str(path.relative_to(folder.root))

    return {
        "run": RUN,
        "seed": options.seed,
        "redis": {"buffer_url": url},
        "tasks": {task.name: {**task_settings(options, task), "prompts": inside(task.prompts)} for task in tasks},
        "producer": {"strategy": options.strategy},
        "worker": {
            "grace_s": 1.0,
            "swap": "abort" if options.partial_rollout else "keep",
            "options": {"model": inside(folder.model), "device": "cpu"},
        },
        "trainer": {
            "model": inside(folder.model),
            "output": inside(folder.trainer),
            "steps": options.steps,
            "learning_rate": LEARNING_RATE,
            "layout": "padded",  # answers are short and of similar length
            "threads": 1,
            "shuffle_rewards": options.shuffle_rewards,
        },
    }


def task_settings(options: DemoOptions, task: DemoTask) -> dict[str, Any]:
    """One `[tasks.<name>]` of it."""
    return {
        "prompts": str(task.prompts),
        "prompt_field": task.prompt_field,
        "answer_field": task.answer_field,
        "judge": task.judge,
        "max_tokens": task.max_tokens,
        "batch_groups": task.batch_groups,
        "group_size": GROUP_SIZE,
        "max_staleness": options.max_staleness,
        "partial_rollout": options.partial_rollout,
        "lease_s": LEASE_S,
        "shuffle_seed": options.seed,
    }


def toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML: plain values first, then a table for each mapping."""
    return "\n".join(_toml_lines(settings, ())) + "\n"


def _toml_lines(settings: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"[{'.'.join(path)}]"] if path else []
    lines += [f"{key} = {_toml_value(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += ["", *_toml_lines(value, (*path, key))]
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False)  # a JSON string is a TOML basic string
