"""A worker process that a test kills: `python -m support.salvage_worker URL RUN SETTINGS`, SETTINGS as JSON."""

import sys

import orjson

from rollq.buffer.buffer import Buffer
from rollq.buffer.tickets import open_queue
from rollq.workers.run import run_worker
from rollq.workers.settings import WorkerSettings
from rollq.workers.task_settings import WorkerTask


def main() -> None:
    """Work until killed, with tokens that a test can tell apart from those of another worker."""
    url, run, text = sys.argv[1:]
    given = orjson.loads(text)
    tasks = {name: WorkerTask.model_validate(task) for name, task in given["tasks"].items()}
    with Buffer.connect(url, run) as buffer:
        run_worker(buffer, open_queue(url, run), tasks, WorkerSettings.model_validate(given["worker"]), seed=7)


if __name__ == "__main__":
    main()
