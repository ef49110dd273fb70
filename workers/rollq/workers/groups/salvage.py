"""Keeps tokens of unfinished samples in the buffer in case this worker is killed.

Invariant: at most `REPORT_TOKENS` of a sample's new tokens, or one of an agent's turns, wait to be sent. Nothing is
sent twice, except that a finished sample is sent as a whole. Salvage is optional: if a call fails or the buffer does
not keep a part, the worker logs the failure once, and stops salvaging that lease.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from rollq.buffer.calls.replies.leases import SalvageOutcome
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import RollqError
from rollq.buffer.values.rollouts import MOST_PART_BYTES, MOST_PARTS, Sample, SamplePart, SampleStatus
from rollq.buffer.wire.parts import rest_of
from rollq.workers.batcher import Batcher
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.protocol import REPORT_TOKENS
from rollq.workers.groups.leases import HeldLease

log = logging.getLogger(__name__)

GATHER_S = 0.05
RECORD_GATHER_S = 0.0
"""Agents wait for each record. Records that arrive during a send are sent together in any case."""
LIMIT = 64
SHORT_TOKENS = 2 * REPORT_TOKENS
"""Answers with at most this many tokens are not salvaged, since generating them again is fast."""


class RecordsFull(RollqError):
    """A group has reached the buffer's limit of recorded calls."""

    def __init__(self) -> None:
        super().__init__(
            f"the calls of one group have filled its records, {MOST_PARTS} calls or {MOST_PART_BYTES >> 20} MiB: lower "
            "max_calls or max_made_tokens in agent_options, or group_size; or set staleness.partial_rollout = false, "
            "so that no calls are recorded"
        )


class SampleSalvage:
    """Salvages one sample. `tokens` counts its response tokens in the buffer or on their way there."""

    def __init__(self, salvage: "Salvage", held: HeldLease, index: int, previous: Sample, *, recorded: bool) -> None:
        self.tokens = previous.response_tokens
        self._salvage = salvage
        self._held = held
        self._index = index
        self._recorded = recorded

    def keep(self, sample: Sample, *, tokens_again: int = 0) -> None:
        """Keep the new tokens of `sample` and its other fields.

        Tokens that were kept earlier, and their values, must be unchanged. `tokens_again` counts the tokens in this
        part that the buffer has already kept.
        """
        held = self._held
        if held.finished:
            return
        held.kept[self._index] = sample
        if held.salvages:
            self._send(sample, tokens_again)

    async def record(self, sample: Sample) -> bool:
        """Keep `sample` as `keep` does, and wait until it is kept. Returns False if the buffer does not keep it.

        Raises `RecordsFull` if the group's records are full, and the exceptions of the call to the buffer.
        """
        held = self._held
        if held.is_full:
            raise RecordsFull
        if held.finished or not held.salvages:
            return False
        sent = self._send(sample, 0)
        held.kept[self._index] = sample
        outcome = await asyncio.shield(sent)
        if outcome is SalvageOutcome.FULL:
            raise RecordsFull
        return outcome is SalvageOutcome.KEPT

    def _send(self, sample: Sample, tokens_again: int) -> "asyncio.Future[SalvageOutcome]":
        held = self._held
        rest = rest_of(sample, self.tokens)
        part = SamplePart(held.lease, held.parts, self._index, self.tokens, rest, tokens_again)
        held.parts += 1
        self.tokens = sample.response_tokens
        return self._salvage.send(held, part, recorded=self._recorded)

    async def hand_over(self, sample: Sample) -> bool:
        """Keep a sample in its current state for another worker to continue or put. Returns whether it is kept."""
        held = self._held
        if sample.status is SampleStatus.PENDING:
            return True
        if not held.salvages:
            return False
        held.kept[self._index] = sample
        tokens_again = 0
        if (
            sample.status is not SampleStatus.ABORTED or sample.awaits_judge
        ):  # its loss mask and arrays may have changed
            tokens_again, self.tokens = self.tokens, 0
        try:
            return await asyncio.shield(self._send(sample, tokens_again)) is SalvageOutcome.KEPT
        except RollqError:  # already logged by the sender
            return False

    def keep_whole(self, sample: Sample) -> None:
        """Keep all of a finished sample in place of its earlier parts, since its loss mask and arrays may have
        changed."""
        tokens, self.tokens = self.tokens, 0
        self.keep(sample, tokens_again=tokens)


class Salvage:
    """Sends parts of samples to the buffer, in order."""

    def __init__(self, calls: BufferCalls) -> None:
        self._parts = Batcher(partial(_salvage, calls), calls.threads, gather_s=GATHER_S, limit=LIMIT)
        self._recorded = Batcher(partial(_record, calls), calls.threads, gather_s=RECORD_GATHER_S, limit=LIMIT)
        self._failures = LogOnce(log)

    def of(self, held: HeldLease, index: int, previous: Sample, *, recorded: bool = False) -> SampleSalvage:
        """The salvage of one sample, which continues `previous`. If `recorded`, the agent loop waits for each part.
        `recorded` must be equal for all of a lease's samples."""
        return SampleSalvage(self, held, index, previous, recorded=recorded)

    def send(self, held: HeldLease, part: SamplePart, *, recorded: bool) -> "asyncio.Future[SalvageOutcome]":
        """Send a part with the next call. If the part is not kept, later parts of its lease are not sent."""
        sent = (self._recorded if recorded else self._parts).submit(part)
        sent.add_done_callback(partial(self._sent, held))
        return sent

    def _sent(self, held: HeldLease, future: "asyncio.Future[SalvageOutcome]") -> None:
        if future.cancelled():
            return
        error = future.exception()  # retrieved, so asyncio does not log it
        if not held.salvages:
            return
        # no part may be missing: later parts could not be read
        held.salvages = error is None and future.result() is SalvageOutcome.KEPT
        held.is_full = error is None and future.result() is SalvageOutcome.FULL
        lease = held.lease
        if error is not None:
            self._failures.warning(
                type(error), "tokens are not salvaged, for example of task %r: %s", lease.task, error
            )
        elif held.is_full:
            self._failures.warning(
                (lease.task, "full"),
                "tokens beyond %d parts or %d bytes are not salvaged, for example of group %d of task %r",
                MOST_PARTS, MOST_PART_BYTES, lease.group_id, lease.task,
            )  # fmt: skip


def _salvage(calls: BufferCalls, parts: Sequence[SamplePart]) -> Sequence[SalvageOutcome]:
    return calls.buffer.salvage(parts)


def _record(calls: BufferCalls, parts: Sequence[SamplePart]) -> Sequence[SalvageOutcome]:
    return calls.buffer.record(parts)
