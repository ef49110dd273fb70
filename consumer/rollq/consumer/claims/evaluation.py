"""Evaluation by a trainer: the trainer opens evaluations, producers and workers run them, and the trainer reads the
results."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import orjson

from rollq.buffer.calls.evaluation_metrics import MetricFunction, evaluation_metrics
from rollq.buffer.calls.evaluations import Evaluations
from rollq.buffer.calls.replies.batches import BatchState
from rollq.buffer.common.counting import count
from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.store.waiter import Waiter, WakeUps
from rollq.consumer.claims.trainer_lease import TrainerLease

log = logging.getLogger(__name__)

MOST_FAILED = 0.1
"""The fraction of failed prompts above which an evaluation warns."""


def evaluate(
    lease: TrainerLease,
    names: Sequence[str] | None,
    *,
    timeout_s: float | None,
    detailed: bool,
    function: MetricFunction | None,
    events: WakeUps,
    stop: threading.Event,
    meanwhile: Callable[[], None],
) -> dict[str, float]:
    """Run the evaluations `names` (None: all) and return their metrics; see `Consumer.evaluate`.

    An unfinished evaluation of an earlier trainer is closed first. `meanwhile` is called between two checks. If `stop`
    is set before the end, there are no metrics.
    """
    buffer = lease.buffer
    opened = {task: _open(buffer, task) for task in _selected(buffer, names)}
    metrics: dict[str, dict[str, float]] = {}
    waiter = Waiter(events, stop=stop, timeout_s=timeout_s, explain=lambda: _explain(lease.buffer, opened))
    try:
        if not _wait(buffer, opened, waiter, meanwhile):
            return {}
        for task, state in opened.items():
            groups = buffer.evaluated(task, state.handle)
            pass_reward = buffer.rules(task).pass_reward
            metrics[task] = evaluation_metrics(
                task, groups, detailed=detailed, pass_reward=pass_reward, function=function
            )
            _warn_of_failures(task, metrics[task])
    finally:
        for task, state in opened.items():
            buffer.close_evaluation(task, state.handle, orjson.dumps({"metrics": metrics.get(task, {})}))
    return {name: value for measured in metrics.values() for name, value in measured.items()}


def _wait(
    buffer: TrainerBuffer, opened: Mapping[str, BatchState], waiter: Waiter, meanwhile: Callable[[], None]
) -> bool:
    """Wait until the evaluations have finished, or until `waiter` stops waiting. Returns whether to measure them."""
    for _ in waiter:
        if not _unfinished(buffer, opened):
            break
        meanwhile()
    if waiter.timed_out:
        log.warning("evaluated only in part after %.0f s: %s", waiter.elapsed_s, waiter.reason)
    elif left := _explain(buffer, opened):
        log.info("the trainer stops, and drops its evaluation: %s", left)
        return False
    return True


def _warn_of_failures(task: str, metrics: Mapping[str, float]) -> None:
    judged, failed = (int(metrics[f"eval/{task}/{name}"]) for name in ("count", "failed"))
    if failed > MOST_FAILED * (judged + failed):
        log.warning(
            "evaluation %s: %d of %d prompts have failed, so the reward covers only the others: `rollq status` shows "
            "the last error",
            task,
            failed,
            judged + failed,
        )


def _selected(buffer: Evaluations, names: Sequence[str] | None) -> Sequence[str]:
    evaluations = [task for task in buffer.tasks() if buffer.rules(task).kind == "eval"]
    if unknown := sorted(set(names or ()) - set(evaluations)):
        raise ConfigError(f"evaluation {unknown[0]!r}: run {buffer.run!r} has the evaluations {evaluations!r}")
    return evaluations if names is None else names


def _open(buffer: Evaluations, task: str) -> BatchState:
    for left in buffer.running_batches(task):
        log.info("evaluation %s: dropped the unfinished one of version %d", task, left.version)
        buffer.close_evaluation(task, left.handle)
    version = max(buffer.clock(task).version, 0)
    return buffer.open_batch(task, f"{version}/{task}", "eval", step=version)


def _unfinished(buffer: Evaluations, opened: Mapping[str, BatchState]) -> dict[str, BatchState]:
    """The present states of incomplete evaluations."""
    states = {task: buffer.batch_by_handle(task, state.handle) for task, state in opened.items()}
    return {task: state for task, state in states.items() if not state.complete}


def _explain(buffer: Evaluations, opened: Mapping[str, BatchState]) -> str:
    return "; ".join(f"evaluation {task}: {_progress(state)}" for task, state in _unfinished(buffer, opened).items())


def _progress(state: BatchState) -> str:
    if not state.closed:
        return f"{count(state.size, 'prompt')} so far: is a producer for it running (`rollq produce`)?"
    done = state.gathered + state.filtered + state.failed
    return f"{done} of {count(state.size, 'prompt')} {'is' if state.size == 1 else 'are'} finished"
