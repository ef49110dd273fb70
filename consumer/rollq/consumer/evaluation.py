"""How a trainer evaluates: it opens evaluations, producers fill them, workers make them, and it reads what they say."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from rollq.buffer.errors import ConfigError
from rollq.buffer.evaluations import Evaluations, evaluation_metrics
from rollq.buffer.replies import BatchState
from rollq.buffer.store.events import Events

log = logging.getLogger(__name__)

POLL_S = 1.0
TOLD_EVERY_S = 30.0


def evaluate(
    checked: Callable[[], Evaluations],
    names: Sequence[str] | None,
    *,
    timeout_s: float | None,
    detailed: bool,
    events: Events,
    stop: threading.Event,
    meanwhile: Callable[[], None],
) -> dict[str, float]:
    """See `Consumer.evaluate`. What an earlier trainer left of an evaluation is closed first.

    `checked` gives the buffer as long as the run is ours, and raises when it is not; `meanwhile` is called in waits.
    """
    buffer = checked()
    known = [task for task in buffer.tasks() if buffer.rules(task).kind == "eval"]
    if unknown := sorted(set(names or ()) - set(known)):
        raise ConfigError(f"evaluation {unknown[0]!r}: run {buffer.run!r} has the evaluations {known!r}")
    opened = {task: _open(buffer, task) for task in (known if names is None else names)}
    try:
        _wait(checked, opened, timeout_s, events, stop, meanwhile)
        metrics: dict[str, float] = {}
        for task, state in opened.items():
            metrics |= evaluation_metrics(task, buffer.evaluated(task, state.handle), detailed=detailed)
    finally:
        for task, state in opened.items():
            buffer.close_evaluation(task, state.handle)
    return metrics


def _open(buffer: Evaluations, task: str) -> BatchState:
    for left in buffer.running_batches(task):
        log.info("evaluation %s: what is left of it at version %d is dropped", task, left.version)
        buffer.close_evaluation(task, left.handle)
    version = max(buffer.clock(task).version, 0)
    return buffer.open_batch(task, f"{version}/{task}", "eval", step=version)


def _wait(
    checked: Callable[[], Evaluations],
    opened: dict[str, BatchState],
    timeout_s: float | None,
    events: Events,
    stop: threading.Event,
    meanwhile: Callable[[], None],
) -> None:
    started_s = told_s = time.monotonic()
    while not stop.is_set():
        buffer = checked()
        states = {task: buffer.batch_by_handle(task, state.handle) for task, state in opened.items()}
        open_ones = [task for task, state in states.items() if not state.complete]
        if not open_ones:
            return
        now_s = time.monotonic()
        late = timeout_s is not None and now_s - started_s >= timeout_s
        if late or now_s - told_s >= TOLD_EVERY_S:
            told_s = now_s
            for task in open_ones:
                log.warning("evaluation %s after %.0f s: %s", task, now_s - started_s, _explain(states[task]))
        if late:
            return
        meanwhile()
        left_s = POLL_S if timeout_s is None else timeout_s - (time.monotonic() - started_s)
        events.wait(min(POLL_S, max(left_s, 0.0)))


def _explain(state: BatchState) -> str:
    if not state.closed:
        return f"{state.size} prompts so far: is a producer running that knows it (`rollq produce`)?"
    done = state.gathered + state.filtered + state.failed
    return f"{done} of {state.size} prompts are finished"
