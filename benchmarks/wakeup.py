"""The time from the last put of a batch until the waiting trainer has the batch."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.results import Result
from benchmarks.world import TASK, admit_and_lease, make_sample, results_of, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.consumer.consumer import Consumer

RUN = "wakeup"
BATCH_GROUPS = 32
GROUP_SIZE = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48
SETTLE_S = 0.02
"""How long the trainer has waited before the last put."""
RULES = TaskRules(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, max_staleness=100_000)


def measure(quick: bool) -> list[Result]:
    """One result: from before the last put until the trainer, a separate process, has arrays and advantages."""
    batches = 3 if quick else 200
    random = np.random.default_rng(0)
    group = [make_sample(random, PROMPT_TOKENS, RESPONSE_TOKENS, version=0) for _ in range(GROUP_SIZE)]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    waits_ms = []
    with server() as running, Buffer.connect(running.url, RUN) as buffer:
        buffer.create_run()
        buffer.register_task(TASK, RULES)
        trainer = context.Process(target=train, args=(running.url, batches, theirs), daemon=True)
        trainer.start()
        epoch = int(_receive(ours))
        for step in range(1, batches + 1):
            leases = admit_and_lease(buffer, epoch, (step - 1) * BATCH_GROUPS, BATCH_GROUPS, version=0)
            *first, last = results_of(leases, [group] * BATCH_GROUPS)
            buffer.put(first)
            time.sleep(SETTLE_S)
            put_s = time.monotonic()
            buffer.put([last])
            waits_ms.append((_receive(ours) - put_s) * 1e3)
        trainer.join()
    return [
        Result(
            name="wakeup",
            what=f"last put of a batch ({BATCH_GROUPS} groups x {GROUP_SIZE}) until the waiting consumer holds it",
            unit="ms",
            target=10.0,
            better="lower",
            values=tuple(waits_ms),
            details={"p99_ms": float(np.percentile(waits_ms, 99))},
        )
    ]


def train(url: str, batches: int, parent: Connection) -> None:
    """Run a trainer that trains nothing: it sends its epoch, then the arrival time of each batch (s, monotonic)."""
    with Consumer.connect(url, run=RUN, weights={}) as consumer:
        parent.send_bytes(b"%d" % consumer.epoch)
        for batch in consumer:
            parent.send_bytes(repr(time.monotonic()).encode())
            consumer.commit(batch)
            consumer.checkpoint(batch.step)
            if batch.step == batches:
                return


def _receive(connection: Connection) -> float:
    if not connection.poll(60):
        raise RuntimeError("the consumer sends nothing")
    return float(connection.recv_bytes())
