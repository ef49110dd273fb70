"""Spans of a worker's attempts at groups: queued, the attempt, its turns and judgements, and putting its result.

Times follow the server's clock: a lease holds the server's time, and the worker's monotonic clock counts from there.
Times are late by at most the lease call's duration.
"""

from collections import Counter
from collections.abc import Sequence
from time import monotonic, time

from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.common.means import mean_of, present
from rollq.buffer.tracing.spans import Attributes, GroupTrace
from rollq.buffer.tracing.tracer import Tracer
from rollq.buffer.values.rollouts import Lease, Sample
from rollq.workers.engines.protocol import Completion, Request

ENDS = (PutOutcome.FILTERED, PutOutcome.FAILED, PutOutcome.DROPPED)
"""The outcomes of groups that no trainer gets. The worker ends these groups' traces."""


class ServerClock:
    """The server's clock, extrapolated by this machine's monotonic clock; this machine's wall clock until the first
    lease."""

    def __init__(self) -> None:
        self._ms, self._at_s = time() * 1000, monotonic()

    def set(self, ms: float, at_s: float) -> None:
        """Note that the server's clock was `ms` at `at_s` (monotonic)."""
        self._ms, self._at_s = ms, at_s

    def ms(self, at_s: float) -> float:
        """The server's clock at `at_s` (monotonic)."""
        return self._ms + (at_s - self._at_s) * 1000


class AttemptTrace:
    """The spans of one attempt, or of a loan that takes some of an attempt's samples."""

    def __init__(self, tracer: Tracer, trace: GroupTrace, lease: Lease, clock: ServerClock, worker: str) -> None:
        self._tracer = tracer
        self._trace = trace
        self._lease = lease
        self._clock = clock
        self._worker = worker
        attempt_id = trace.attempt_id(lease.attempt)
        if lease.borrowed:
            self._name, self._id, self._parent_id = "loan", trace.id_of("loan", lease.nonce), attempt_id
            self._began_ms = clock.ms(monotonic())
        else:
            self._name, self._id, self._parent_id = "attempt", attempt_id, trace.life_id
            self._began_ms = lease.leased_ms
        self._turns = Counter[int]()
        self._judged = Counter[int]()
        self._facts: Attributes = {}
        self._error = ""
        if lease.attempt == 1 and not lease.borrowed:
            tracer.emit([trace.part("queued", 1, lease.admitted_ms, lease.leased_ms, {})])

    def generated(self, index: int, started_s: float, request: Request, completion: Completion) -> None:
        """Note that one request to the engine, a turn of sample `index`, has ended."""
        self._turns[index] += 1
        versions = [span.version for span in completion.versions]
        self._child("generate", index, self._turns[index], started_s, {
            "rollq.turn": self._turns[index],
            "rollq.context_tokens": len(request.context),
            "rollq.tokens": len(completion.ids),
            "rollq.finish_reason": completion.finish_reason.value,
            **({"rollq.oldest_version": min(versions), "rollq.newest_version": max(versions)} if versions else {}),
        })  # fmt: skip

    def judged(self, index: int, started_s: float, sample: Sample) -> None:
        """Note that sample `index` has been judged, with the result in `sample`."""
        self._judged[index] += 1
        reward: Attributes = {} if sample.reward is None else {"rollq.reward": sample.reward}
        self._child("judge", index, self._judged[index], started_s, reward, sample.error or "")

    def put(self, started_s: float, samples: Sequence[Sample], outcome: PutOutcome) -> None:
        """Note that the result has been put."""
        self._emit("put", self._trace.id_of("put", self._lease.nonce), self._clock.ms(started_s), {})
        self._facts = facts_of(samples) | {"rollq.outcome": outcome.value}
        if outcome in ENDS or (self._lease.evaluation and outcome is PutOutcome.GATHERED):
            self._end_life()

    def handed_back(self, error: str) -> None:
        """Note that the group has been handed back without a result. `error` is the reason why the try counts as spent,
        or ''.
        """
        self._facts, self._error = {"rollq.outcome": "handed back"}, error

    def dropped(self, error: str) -> None:
        """Note that the group has been dropped."""
        self._facts, self._error = {"rollq.outcome": PutOutcome.DROPPED.value}, error
        self._end_life()

    def end(self, cut: str) -> None:
        """End the attempt or the loan. `cut` is the reason for stopping it, or ''."""
        facts: Attributes = {
            "rollq.attempt": self._lease.attempt,
            "rollq.tries": self._lease.tries,
            "rollq.worker": self._worker,
            **self._facts,
        }
        error = self._error or ("" if self._facts else cut)
        now_ms = self._clock.ms(monotonic())
        span = self._trace.span(self._name, self._id, self._parent_id, self._began_ms, now_ms, facts, error)
        self._tracer.emit([span])

    def _end_life(self) -> None:
        now_ms = self._clock.ms(monotonic())
        facts = {**self._facts, "rollq.evaluation": self._lease.evaluation}
        self._tracer.emit([self._trace.life(self._lease.admitted_ms, now_ms, facts)])

    def _child(
        self, name: str, index: int, number: int, started_s: float, attributes: Attributes, error: str = ""
    ) -> None:
        span_id = self._trace.id_of(name, self._lease.nonce, index, number)
        self._emit(name, span_id, self._clock.ms(started_s), {"rollq.sample": index, **attributes}, error)

    def _emit(self, name: str, span_id: int, start_ms: float, attributes: Attributes, error: str = "") -> None:
        now_ms = self._clock.ms(monotonic())
        self._tracer.emit([self._trace.span(name, span_id, self._id, start_ms, now_ms, attributes, error)])


class AttemptTraces:
    """Begins the traces of a worker's attempts. There is no trace without a tracer, or for groups that tracing leaves
    out."""

    def __init__(self, tracer: Tracer | None, worker: str) -> None:
        self._tracer = tracer
        self._worker = worker
        self._clock = ServerClock()

    def begin(self, lease: Lease, asked_s: float) -> AttemptTrace | None:
        """Begin the trace of a lease requested at `asked_s` (monotonic)."""
        if self._tracer is None:
            return None
        if not lease.borrowed:
            self._clock.set(lease.leased_ms, asked_s)
        trace = self._tracer.trace_of(lease.task, lease.group_id)
        return trace and AttemptTrace(self._tracer, trace, lease, self._clock, self._worker)

    def close(self) -> None:
        """Send the remaining spans, for a limited time."""
        if self._tracer is not None:
            self._tracer.close()


def facts_of(samples: Sequence[Sample]) -> dict[str, str | int | float | bool]:
    """A span's attributes for samples: their number, tokens, versions, and mean reward."""
    reward = mean_of(sample.reward for sample in samples)
    oldest = present(sample.oldest_version for sample in samples)
    newest = present(sample.newest_version for sample in samples)
    return {
        "rollq.samples": len(samples),
        "rollq.tokens": sum(sample.response_tokens for sample in samples),
        **({"rollq.oldest_version": min(oldest), "rollq.newest_version": max(newest)} if oldest else {}),
        **({} if reward is None else {"rollq.mean_reward": reward}),
    }
