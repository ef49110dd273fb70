"""The producer's side of the buffer: prompts in, dead leases back, stale groups out."""

from collections.abc import Sequence
from itertools import chain

from rollq.buffer.errors import ConfigError
from rollq.buffer.replies import Admitted, Control, PromptStats
from rollq.buffer.rollouts import Prompt, Status
from rollq.buffer.store.keys import task_keys
from rollq.buffer.sweeping import MAX_IDS_PER_CALL, Sweeping
from rollq.buffer.wire.prompts import encode_prompt


class Admission(Sweeping):
    """Calls of producers. Any number of them may run for one task."""

    def admit(
        self,
        task: str,
        prompts: Sequence[tuple[Prompt, int]],
        *,
        epoch: int,
        cursor: int,
        target: int,
        step: int,
    ) -> Admitted:
        """Turn prompts into pending groups, as many as `target` leaves room for, and move the cursor with them.

        `prompts` are (prompt, dataset cursor after it); they are admitted from the front, and only if the cursor still
        is `cursor` and the trainer's epoch still `epoch`. `target` bounds pending, running, completed and claimed
        groups and a batch for each trained step. `step` is the train step that they are for.
        """
        args = [
            item
            for prompt, after in prompts[:MAX_IDS_PER_CALL]
            for item in (after, "" if prompt.row is None else prompt.row, encode_prompt(prompt))
        ]
        count, first_id, now = self.call_task("admit", task, epoch, cursor, target, step, *args)
        return Admitted(count, first_id, now)

    def prompt_stats(self, task: str, rows: Sequence[int]) -> dict[int, PromptStats]:
        """Statistics of the prompts in these rows; rows that were never tried are left out.

        Kept only for tasks with `prompt_stats`; each takes 54 bytes of the server's memory (Valkey 9), 83 (Redis 7.0).
        """
        key = task_keys(self.run, task).prompts
        chunks = [rows[at : at + MAX_IDS_PER_CALL] for at in range(0, len(rows), MAX_IDS_PER_CALL)]
        found = self.send_all([("HMGET", key, *chunk) for chunk in chunks])
        values = zip(rows, chain.from_iterable(found), strict=True)
        return {row: _decode_stats(value) for row, value in values if value is not None}

    def recycle(
        self,
        task: str,
        *,
        epoch: int,
        target: int,
        limit: int,
        statuses: Sequence[Status] = (Status.ABORTED, Status.EXPIRED),
    ) -> int:
        """Send up to `limit` aborted and expired groups back to pending, within `target`. Returns how many went."""
        if limit <= 0:
            return 0
        names = [status.value for status in statuses]
        return int(self.call_task("recycle", task, epoch, target, min(limit, MAX_IDS_PER_CALL), *names))

    def set_control(self, task: str, control: Control, reason: str = "", *, only_from: Control | None = None) -> None:
        """Let a task's production run, pause or end, with the reason; engines that sleep stay asleep.

        `only_from`: do nothing when the task has another control by then. Raises `ConfigError` for `SLEEP`, which only
        the trainer sets.
        """
        if control is Control.SLEEP:
            raise ConfigError("engines are put to sleep by the trainer that needs their memory")
        self.call_task("set_control", task, control.value, reason, "" if only_from is None else only_from.value)


def _decode_stats(value: bytes) -> PromptStats:
    tries, samples, *averages = value.split(b",")
    return PromptStats(int(tries), int(samples), *map(float, averages))
