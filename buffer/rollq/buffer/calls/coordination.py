"""The coordinator's side of the buffer: batches that end as a whole, through a pipeline."""

from collections.abc import Mapping

import orjson

from rollq.buffer.calls.evaluations import Evaluations
from rollq.buffer.calls.fetching import Fetching
from rollq.buffer.calls.replies.batches import Finalizing
from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.calls.sweeping import Sweeping
from rollq.buffer.values.rollouts import PipelineOutput

ABORTED_GROUPS_PER_CALL = 200


class Coordination(Evaluations, Fetching, Sweeping):
    """Calls of coordinators."""

    def cut_off(self, task: str, handle: str) -> int:
        """Ask workers for a batch's finished groups; returns how many groups are still to come.

        Workers put groups that have enough finished samples; the other groups leave the batch. Does nothing if groups
        need all their samples. Harmless to repeat.
        """
        return int(self.call_task("cut_off", task, handle))

    def begin_finalize(self, task: str, handle: str, nonce: str, *, lease_s: float) -> Finalizing:
        """Take a train batch for its pipeline; see `Finalizing`. `nonce` identifies the caller. Harmless to repeat."""
        state, result, *groups = self.call_task("begin_finalize", task, handle, nonce, round(lease_s * 1000))
        finished = [
            ClaimedGroup(task, group_id, oldest, arrival, tries, tokens, float(reward or 0), payload.decode())
            for group_id, oldest, arrival, tries, tokens, reward, payload in groups
        ]
        return Finalizing(state.decode(), result, tuple(finished))

    def end_finalize(
        self, task: str, handle: str, nonce: str, result: bytes, shaped: Mapping[int, PipelineOutput | str]
    ) -> Finalizing:
        """File a batch's groups. `shaped` maps ids to the pipeline's output, or the reason to filter the group.

        `result` is kept. Unfinished groups become aborted. Returns the outcome, which another process may have decided.
        """
        args = [item for group_id, given in shaped.items() for item in (group_id, *_encode_shaped(given))]
        state, stored = self.call_task("end_finalize", task, handle, nonce, result, *args)
        return Finalizing(state.decode(), stored)

    def undo_finalize(self, task: str, handle: str, nonce: str) -> None:
        """Give a batch back after its pipeline failed: the batch is running again, with all its results."""
        self.call_task("undo_finalize", task, handle, nonce)

    def abort_batch(self, task: str, handle: str, reason: str, *, keep_finished: bool = False) -> int:
        """End a batch and drop its unfinished groups. Finished groups are kept as completed, or dropped too.

        Returns how many groups were dropped; 0 if the batch has already ended.
        """
        total, more = 0, 1
        while more:
            more, dropped = self.call_task(
                "abort_batch", task, handle, reason, int(keep_finished), ABORTED_GROUPS_PER_CALL
            )
            total += dropped
        return total


def _encode_shaped(given: PipelineOutput | str) -> tuple[bytes | str, int]:
    if isinstance(given, str):
        return given, 0
    return orjson.dumps({"rewards": given.rewards, "advantages": given.advantages}), 1
