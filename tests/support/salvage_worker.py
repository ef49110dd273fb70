"""A worker that a test kills."""

from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.tickets import open_queue
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.run import run_worker
from rollq.workers.settings import WorkerSettings


def work(url: str, run: str, rules: dict[str, Any], settings: dict[str, Any]) -> None:
    """Work on the task `math` until killed, with tokens that a test can tell apart from those of another worker."""
    tasks = {"math": WorkerTask.model_validate(rules)}
    with Buffer.connect(url, run) as buffer:
        run_worker(buffer, open_queue(url, run), tasks, WorkerSettings.model_validate(settings), seed=7)
