"""A task set's tasks as rows, and rows' tasks."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset

TASK = "task"
"""The key of a task's digest in a row's `env`."""
MOST_UNKNOWN = 50_000
"""How many tasks after the last match are searched for a row."""


def row_of(task: Task) -> dict[str, Any]:
    """The row of a task: its prompt, and its digest."""
    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    prompt = data.prompt
    if prompt is None:  # another seat opens the conversation
        prompt = data.description or data.name or f"task {data.idx}"
    env = {"env": {TASK: digest_of(task)}}
    if isinstance(prompt, str) and not system:
        return {"prompt": prompt, **env}
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
    return {"messages": [*system, *said], **env}


def digest_of(task: Task) -> str:
    """The digest of a task's data, without its index in the set."""
    data = task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]


class Tasks:
    """A set's tasks by digest. The set is read only as far as needed."""

    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self._rest: Iterator[Task] = iter(taskset)
        self._known: dict[str, Task] = {}

    def find(self, digest: str) -> Task | None:
        """The task with this digest; None if it is not among the tasks read so far and the next `MOST_UNKNOWN`. May
        block."""
        looked = 0
        while digest not in self._known and looked < MOST_UNKNOWN:
            task = next(self._rest, None)
            if task is None:
                break
            looked += 1
            self._known[digest_of(task)] = task
        return self._known.get(digest)
