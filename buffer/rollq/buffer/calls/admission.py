"""The producer's side of the buffer: admits prompts, reclaims dead workers' groups, and removes stale groups."""

from collections.abc import Sequence
from itertools import chain

from rollq.buffer.calls.replies.prompts import Admitted, PromptRecord, PromptStats, UnusableRow
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.calls.sweeping import MAX_IDS_PER_CALL, MOVED_IDS_PER_CALL, Sweeping
from rollq.buffer.common.portions import slices
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Prompt, Status
from rollq.buffer.wire.prompts import encode_prompt


class Admission(Sweeping):
    """The calls that producers make. Any number of producers may run for one task."""

    def admit(
        self, task: str, prompts: Sequence[tuple[Prompt, int]], *, epoch: int, cursor: int, target: int, step: int
    ) -> Admitted:
        """Turn prompts into pending groups, as many as `target` leaves room for, and move the cursor with them.

        `prompts` holds pairs of a prompt and the dataset cursor after it. Prompts are admitted in order, and only if
        the cursor is still `cursor`, the trainer's epoch is still `epoch`, and production is running. `target` bounds
        the number of `SCHEDULED` groups plus the groups in the trained steps' batches. `step` is the train step that
        the new groups are for. Raises `ConfigError` for an offline task.
        """
        self._check_is_sampled(task)
        args = [
            item
            for prompt, after in prompts[:MAX_IDS_PER_CALL]
            for item in (after, "" if prompt.row is None else prompt.row, encode_prompt(prompt))
        ]
        count, first_id, now = self.call_task("admit", task, epoch, cursor, target, step, *args)
        return Admitted(count, first_id, now)

    def record_prompts(
        self, task: str, digest: str, rows: int, seeds: str, path: str, *, revision: int = 0
    ) -> PromptRecord:
        """Record a task's prompts, replacing the record with this `revision`; 0 means that there is no record yet.

        Returns the resulting record. If the digest changes, prompt statistics are dropped.
        """
        record = self.call_task("record_prompts", task, revision, digest, rows, seeds, path)
        now, digest_now, count, order, place = (value.decode(errors="replace") for value in record)
        return PromptRecord(int(now), digest_now, int(count), order, place)

    def prompt_stats(self, task: str, rows: Sequence[int]) -> dict[int, PromptStats]:
        """Return the statistics of the prompts in these rows, except rows that were never tried.

        Statistics are kept only for tasks with `prompt_stats`. A prompt's statistics take 54 bytes of server memory on
        Valkey 9, and 83 on Redis 7.0.
        """
        key = task_keys(self.run, task).prompts
        replies = self.send_all([("HMGET", key, *some) for some in slices(rows, MAX_IDS_PER_CALL)])
        values = zip(rows, chain.from_iterable(replies), strict=True)
        return {row: _decode_stats(value) for row, value in values if value is not None}

    def rows_too_long(self, task: str) -> dict[int, int]:
        """Row of a prompt that a worker found too long -> the prompt's number of tokens."""
        tokens_by_row = self.send("HGETALL", task_keys(self.run, task).too_long)
        return {int(row): int(tokens) for row, tokens in tokens_by_row.items()}

    def account_rows(self, task: str, account: str, *, rows: int, passed: int, unusable: Sequence[UnusableRow]) -> None:
        """Record a task's row counts: all `rows`, rows read up to the cursor `passed`, and `unusable` rows.

        Each row counts once, even if several producers report it. `account` names the file and the way it is read; a
        different account restarts the counts.
        """
        for start in range(0, max(1, len(unusable)), MAX_IDS_PER_CALL):
            portion = chain.from_iterable(unusable[start : start + MAX_IDS_PER_CALL])
            self.call_task("account_rows", task, account, rows, passed, *portion)

    def recycle(
        self,
        task: str,
        *,
        epoch: int,
        target: int,
        limit: int,
        statuses: Sequence[Status] = (Status.ABORTED, Status.EXPIRED),
    ) -> int:
        """Send up to `limit` aborted and expired groups back to pending, within `target`; returns how many moved."""
        names, total = [status.value for status in statuses], 0
        while (wanted := min(limit - total, MOVED_IDS_PER_CALL)) > 0:
            moved = self.call_task("recycle", task, epoch, target, wanted, *names)
            total += moved
            if moved < wanted:
                break
        return total

    def set_control(self, task: str, control: Control, reason: str = "", *, only_from: Control | None = None) -> None:
        """Run, pause or end a task's production, and record the reason. Sleeping engines stay asleep.

        With `only_from`, the call does nothing unless the task still has that control. Raises `ConfigError` for
        `SLEEP`, which only the trainer sets.
        """
        if control is Control.SLEEP:
            raise ConfigError("only the trainer that needs their memory can put engines to sleep")
        self._change_control("set_control", task, control.value, reason, "" if only_from is None else only_from.value)


def _decode_stats(value: bytes) -> PromptStats:
    tries, samples, *averages = value.split(b",")
    return PromptStats(int(tries), int(samples), *map(float, averages))
