"""TensorBoard: scalars, and the rollouts of a step as a text table."""

from pathlib import Path

import orjson
from torch.utils.tensorboard import SummaryWriter

from rollq.consumer.trackers.tracker import Entry, Rollout

COLUMNS = ("task", "group", "prompt", "text", "reward", "parts", "advantage", "staleness", "finish_reason")


class TensorBoard:
    """Event files in `folder`. Steps from `first_step` on, which an earlier start may have written, are replaced."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, entry: Entry) -> None:
        """Write an entry, and flush it."""
        for name, value in entry.scalars.items():
            self._writer.add_scalar(name, value, entry.step)
        if entry.rollouts:
            self._writer.add_text("rollouts", _table(entry), entry.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _table(entry: Entry) -> str:
    """The rollouts in Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(rollout) for rollout in entry.rollouts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(rollout: Rollout) -> tuple[str, ...]:
    return tuple(_cell(getattr(rollout, column)) for column in COLUMNS)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = orjson.dumps(value).decode() if isinstance(value, dict) else str(value)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(character, entity)
    return text
