"""RQ's view of a run: its queue, registries and workers, read without executing anything that is stored in Redis.

`rq info` is not safe on a queue that others can write to: it unpickles jobs while it cleans up registries. This view
only counts jobs, and uses the ticket's job class and serializer.
"""

from rq import Queue
from rq.worker import Worker

from rollq.buffer.store.connection import Patience, patiently

PATIENCE = Patience(unanswered_s=2.0)
"""Unlike a role, this view waits only briefly for a server that does not answer."""


def rq_lines(queue: Queue) -> list[str]:
    """One line for the queue and one per registered worker. Raises `ServerUnavailable`, `ServerRefused`."""
    return patiently(queue.connection, lambda: [_queue_line(queue), *_worker_lines(queue)], PATIENCE)


def _queue_line(queue: Queue) -> str:
    registries = {
        "executing": queue.started_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
    }
    counts = [f"{registry.get_job_count(cleanup=False)} {name}" for name, registry in registries.items()]
    return f"queue {queue.name}: {queue.count} queued, {', '.join(counts)}"


def _worker_lines(queue: Queue) -> list[str]:
    workers = Worker.all(queue=queue, job_class=queue.job_class, serializer=queue.serializer)
    return [
        f"worker {worker.name} ({worker.hostname}, process {worker.pid}): {worker.get_state()}; "
        f"{worker.successful_job_count} finished, {worker.failed_job_count} failed"
        for worker in sorted(workers, key=lambda worker: str(worker.name))
    ] or ["no worker is registered"]
