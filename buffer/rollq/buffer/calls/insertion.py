"""Inserts finished samples that no worker in the run made, such as expert demonstrations, without a lease.

A source names the origin of groups, and the buffer counts each source's groups. A call inserts only groups beyond that
count, so repeating or resuming a call inserts nothing twice.
"""

from collections.abc import Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Any

from rollq.buffer.calls.inspection import Inspection
from rollq.buffer.calls.put_args import MAX_GROUP_BYTES, GroupArgs, encoded_rows, portions_of
from rollq.buffer.errors import ConfigError, InvalidGroup, InvalidPrompt, ServerRefused
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE, FinishedGroup
from rollq.buffer.wire.group_fields import encode_whole
from rollq.buffer.wire.prompts import encode_prompt
from rollq.buffer.wire.sample_outcomes import encode_outcomes

MOST_SOURCE_CHARACTERS = 200


class Insertion(Inspection):
    """Calls that fill offline tasks."""

    def insert(self, task: str, groups: Sequence[FinishedGroup], *, source: str, after: int = 0) -> int:
        """Insert finished groups of `source` as completed groups; returns how many are new.

        `task` must be offline. `after` is the number of earlier groups of the source; see `inserted`. Every sample must
        be completed and `unversioned` and have a reward; its logprobs may be `absent_logprobs`. All groups are checked
        before the first is inserted. Safe to repeat, even after a crash halfway.

        Raises `ConfigError` if the task is not offline or earlier groups of the source are missing, `InvalidGroup`
        naming the group, sample and field, and `ServerRefused` when the buffer is full. Inserted groups then stay, and
        the same call inserts the rest later.
        """
        rules = self.rules(task)
        if not rules.offline:
            raise ConfigError(f"task {task!r} is sampled; only tasks with offline = true take insertions")
        if not 0 < len(source) <= MOST_SOURCE_CHARACTERS:
            raise ConfigError(f"source {source!r}: must have 1 to {MOST_SOURCE_CHARACTERS} characters")
        if after < 0:
            raise ConfigError(f"after = {after}: must be the number of groups before these, 0 or more")
        encoded = [_encode_at(number, group, rules) for number, group in enumerate(groups, after)]
        done = self.inserted(task, source)
        if done < after:
            raise ConfigError(
                f"after = {after}: only {done} groups of source {source!r} were inserted into task {task!r}; insert "
                "the missing ones first"
            )
        last, added = after + len(encoded), 0
        while done < last:
            portion = next(portions_of(islice(encoded, done - after, None)))
            self._check_room()
            now = self.call_task("insert", task, source, done, *chain.from_iterable(group.args for group in portion))
            added += min(now, last) - done
            done = now
        return added

    def inserted(self, task: str, source: str) -> int:
        """How many groups from `source` have been inserted into the task so far."""
        return int(self.send("HGET", task_keys(self.run, task).sources, source) or 0)

    def _check_room(self) -> None:
        fullness = self.fullness()
        if fullness.is_full:
            raise ServerRefused(
                f"{fullness}, so the insertion stopped: raise {fullness.limit}, or insert the rest once the trainer "
                "has trained some groups and saved a checkpoint"
            )


def _encode_at(index: int, group: FinishedGroup, rules: TaskRules) -> GroupArgs:
    try:
        return encode_finished(group, rules)
    except (InvalidPrompt, InvalidGroup) as error:
        raise InvalidGroup(f"group {index}: {error}") from None


def encode_finished(group: FinishedGroup, rules: TaskRules, vocab_size: int | None = None) -> GroupArgs:
    """Encode a group as arguments for `insert`, in the order in `insert.lua`.

    Raises `InvalidPrompt` and `InvalidGroup`, including for token ids of `vocab_size` or more.
    """
    prompt, samples = encode_prompt(group.prompt), group.samples
    whole = encode_whole(
        samples, group_size=rules.group_size, vocab_size=vocab_size, max_bytes=MAX_GROUP_BYTES, inserted=True
    )
    frame = bytes(whole)
    reward = fmean(sample.reward for sample in samples if sample.reward is not None)
    tokens = [sample.response_tokens for sample in samples]
    rows, outcomes = encoded_rows(samples), encode_outcomes(samples, tokens)
    args: list[Any] = [prompt, reward, sum(tokens), len(frame), rows, outcomes, frame]
    return GroupArgs(args, {WHOLE: frame})
