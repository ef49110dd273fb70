"""rollq as a store. Leases are taken before the timed part, and batches are committed after it."""

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from numpy.typing import NDArray

from benchmarks.exchange import NEVER_STALE
from benchmarks.peers.protocol import GROUP_SIZE, Columns, serve
from benchmarks.world import SAMPLING, TASK, admit_and_lease, results_of, run, server
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import FinishReason, GroupResult, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.values.sample_columns import Samples


class Rollq:
    """A server with the append-only file on (everysec), and one run for each request."""

    def __init__(self, url: str) -> None:
        self.version = f"rollq {version('rollq')}"
        self._url = url
        self._runs = 0
        self._stack = ExitStack()

    def prepare(self, groups: Sequence[Columns], calls: int) -> None:
        self._runs += 1
        count, samples = len(groups), list(map(samples_of, groups))
        rules = TaskRules(
            batch_groups=count, group_size=GROUP_SIZE, max_staleness=NEVER_STALE, max_uncheckpointed_steps=1_000
        )
        self._buffer, self._epoch = self._stack.enter_context(run(self._url, f"peers-{self._runs}", rules))
        self._sizes, self._step = {TASK: count}, 0
        cursors = range(0, calls * count, count)
        leases = [admit_and_lease(self._buffer, self._epoch.epoch, cursor, count, version=0) for cursor in cursors]
        self._results: list[list[GroupResult]] = [results_of(each, samples) for each in leases]

    def exchange(self) -> NDArray[Any]:
        self._buffer.put(self._results[self._step])
        self._step += 1
        claimed = self._buffer.claim(self._epoch, self._step, self._sizes)
        assert isinstance(claimed, Claimed)
        fetched = self._buffer.fetch(claimed.groups)
        columns = Samples.of(fetched[-1].samples)
        return columns.segments[-1][0].response_ids

    def finish(self) -> None:
        for step in range(1, self._step + 1):
            self._buffer.commit(self._epoch, step)
        self._buffer.checkpoint(self._epoch, self._step)
        self._stack.close()


def samples_of(group: Columns) -> list[Sample]:
    """The samples of a group."""
    columns = zip(group["prompt_ids"], group["response_ids"], group["logprobs"], group["rewards"], strict=True)
    return [
        Sample(
            segments=(Segment(prompt_ids, response_ids, logprobs, versions=(VersionSpan(1, 0, len(response_ids)),)),),
            status=SampleStatus.COMPLETED,
            finish_reason=FinishReason.STOP,
            reward=float(reward),
            sampling=SAMPLING,
        )
        for prompt_ids, response_ids, logprobs, reward in columns
    ]


if __name__ == "__main__":
    with server() as running:
        serve(Rollq(running.url))
