"""Checks that a task still has the prompts that its run began with: the cursor and the statistics depend on their
order.

The run has a record of each task's prompts: the file's digest, number of rows and path, and the seeds of the order.
The first producer writes it.
"""

import logging

from rollq.buffer.calls.replies.prompts import PromptRecord
from rollq.buffer.errors import RunMismatch
from rollq.buffer.roles import ProducerBuffer
from rollq.buffer.rules.shards import task_of
from rollq.producer.prompts import PromptFile

log = logging.getLogger(__name__)


def check_prompts(buffer: ProducerBuffer, task: str, file: PromptFile, seed: int) -> None:
    """Compare a task's or an evaluation's prompts with the recorded prompts, or record them if there is no record.

    If they differ, `on_prompts_changed` decides whether this raises `RunMismatch` or records the new prompts. A file
    with the same bytes at another path is equal.
    """
    is_evaluation = buffer.rules(task).kind == "eval"
    seeds = "" if is_evaluation else f"seed = {seed}"
    table = f"{'evaluations' if is_evaluation else 'tasks'}.{task_of(task)}"
    own = (file.fingerprint, file.rows, seeds, str(file.path))
    recorded = buffer.record_prompts(task, *own)
    while (recorded.digest, recorded.seeds) != (file.fingerprint, seeds):
        change = _change(recorded, file, seeds)
        if file.settings.on_prompts_changed == "fail":
            raise RunMismatch(
                f"{table}.prompts: {change}. The order of the prompts, and the place in it, depend on this: change it "
                f'back, set {table}.rows.on_prompts_changed = "continue" to continue at the same place in the new '
                "order, or give the run another name"
            )
        before, recorded = recorded, buffer.record_prompts(task, *own, revision=recorded.revision)
        if recorded.revision == before.revision + 1:
            log.warning("%s.prompts: %s; production continues at the same place in the new order", table, change)


def _change(known: PromptRecord, file: PromptFile, seeds: str) -> str:
    """Say what has changed: the file or the seeds."""
    if known.digest != file.fingerprint:
        if str(file.path) == known.path:
            return f"{known.path!r} has changed since the run began ({file.rows} rows, {known.rows} before)"
        return (
            f"{str(file.path)!r} ({file.rows} rows) differs from {known.path!r} ({known.rows} rows), which the run had"
        )
    return f"the run had {known.seeds}, but the settings have {seeds}"
