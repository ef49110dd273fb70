"""A task set of verifiers: the rows of a JSON Lines file, whose answers are numbers."""

import json
import re
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Rows"]


class NumberData(vf.TaskData):
    """A row."""

    answer: str


class NumberTaskConfig(vf.TaskConfig):
    """A configuration without options."""


class NumberTask(vf.Task[NumberData, vf.State, NumberTaskConfig]):
    """Rewards the last number of the answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the number is the row's, else 0."""
        numbers = re.findall(r"-?\d+", trace.last_reply or "")
        return float(bool(numbers) and numbers[-1] == self.data.answer)


class RowsConfig(vf.TasksetConfig):
    """The configuration, which names the file."""

    task: NumberTaskConfig = NumberTaskConfig()
    path: str = ""


class Rows(vf.Taskset[NumberTask, RowsConfig]):
    """See the module."""

    def load(self) -> list[NumberTask]:
        """The tasks, in the order of the file."""
        lines = Path(self.config.path).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            NumberTask(NumberData(prompt=row["prompt"][-1]["content"], answer=row["answer"]), self.config.task)
            for row in rows
        ]
