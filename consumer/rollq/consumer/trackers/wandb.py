"""Weights & Biases: scalars, and the rollouts of a step as a table."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import wandb

from rollq.consumer.tracker_settings import WandbSettings
from rollq.consumer.trackers.tracker import Entry, Rollout

COLUMNS: list[str | int] = [field.name for field in fields(Rollout)]


class Wandb:
    """A run of W&B with files in `folder`. Each start of the trainer makes a new W&B run; these are grouped by
    `run`."""

    def __init__(self, settings: WandbSettings, folder: Path, run: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.project, entity=settings.entity, name=run, group=run, mode=settings.mode, dir=str(folder)
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, entry: Entry) -> None:
        """Log an entry; `step` is the axis."""
        logged: dict[str, Any] = {"step": entry.step, **entry.scalars}
        if entry.rollouts:
            logged["rollouts"] = wandb.Table(columns=COLUMNS, data=[_cells(rollout) for rollout in entry.rollouts])
        self._run.log(logged)

    def close(self) -> None:
        """Wait until everything is sent or written."""
        self._run.finish()


def _cells(rollout: Rollout) -> list[Any]:
    values = [getattr(rollout, str(column)) for column in COLUMNS]
    return [orjson.dumps(value).decode() if isinstance(value, dict) else value for value in values]
