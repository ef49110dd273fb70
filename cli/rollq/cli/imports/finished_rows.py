"""Files of finished samples, as groups for `Buffer.insert`. docs/guide/import.md describes the columns.

A row of a user's file is a group: a prompt, read as in the producer, and its responses. In a file written by `rollq
export`, a row is a sample, and consecutive rows form a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from rollq.buffer.archive.export import read_lines_row
from rollq.buffer.archive.rows import sample_of
from rollq.buffer.archive.schema import VERSION_KEY, parquet
from rollq.buffer.calls.insertion import encode_finished
from rollq.buffer.common.columns import look_up
from rollq.buffer.errors import ConfigError, CorruptFrame, InvalidGroup
from rollq.buffer.values.rollouts import (
    FinishedGroup,
    FinishReason,
    Float32Array,
    Int32Array,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    absent_logprobs,
    unversioned,
)
from rollq.buffer.wire.prompts import decode_prompt, ids_problem
from rollq.cli.imports.conversations import check_conversation, conversation_sample, first_turn
from rollq.cli.settings.task_settings import TaskSettings
from rollq.producer.columns import Columns, without_nulls
from rollq.producer.prompts import Table, open_table
from rollq.workers.agents.loops import prompt_tokens
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.groups.read_prompts import tokenizer_of

RESPONSES: Final = ("responses", "response", "completion")
REWARDS: Final = ("rewards", "reward")
LOGPROBS: Final = "logprobs"
_EXPORTED: Final = ("prompt_record", "task", "group_id", "sample", "response_ids")
"""Columns that identify a row of `rollq export`."""

Placed = tuple[str, Mapping[str, Any]]
"""A row's place, for messages, and its columns."""


@dataclass(frozen=True)
class FinishedRows:
    """The groups of the file at `path`, for `task`. `default_reward` is the reward for samples without one; if it is
    None, such samples are errors. `vocab_size` is the number of token ids that the model knows, None for any number."""

    path: Path
    task: TaskSettings
    tokenizer: Tokenizer
    default_reward: float | None = None
    vocab_size: int | None = None

    def groups(self) -> Iterator[tuple[str, FinishedGroup]]:
        """Each group and its place in the file. Raises `InvalidGroup` with the file and the line or row; `ConfigError`
        for a file that cannot be read."""
        for _, members in groupby(_rows(self.path), key=_group_key):
            (place, first), *others = members
            try:
                if _is_exported(first):
                    group = self._exported([first, *(row for _, row in others)])
                else:
                    group = self._written(first)
            except (ValueError, LookupError, TypeError) as error:
                raise InvalidGroup(f"{place}: {error}") from None
            yield place, group

    def check(self) -> Iterator[FinishedGroup]:
        """Yield each group, after all checks of `Buffer.insert`. Raises the exceptions of `groups`."""
        for place, group in self.groups():
            try:
                encode_finished(group, self.task, self.vocab_size)
                self._check_lengths(group)
            except ValueError as error:
                raise InvalidGroup(f"{place}: {error}") from None
            yield group

    def _check_lengths(self, group: FinishedGroup) -> None:
        limits = {"prompt": self.task.max_prompt_tokens, "response": self.task.max_tokens}
        for index, segment in [(i, segment) for i, sample in enumerate(group.samples) for segment in sample.segments]:
            lengths = {"prompt": len(segment.prompt_ids), "response": len(segment.response_ids)}
            for name, setting in (("prompt", "max_prompt_tokens"), ("response", "max_tokens")):
                if lengths[name] > limits[name]:
                    raise ValueError(
                        f"sample {index}: the {name} has {lengths[name]} tokens, more than {setting} = {limits[name]}; "
                        "raise it, or leave the row out"
                    )

    def _written(self, row: Mapping[str, Any]) -> FinishedGroup:
        if _first_given(row, RESPONSES) is None and (first := first_turn(row.get("messages"))) is not None:
            return self._conversation(row, first)
        columns = Columns.from_task(self.task)
        field, responses = _responses(row)
        size = self.task.group_size
        if len(responses) != size:
            given = f"{len(responses)} response{'s' * (len(responses) != 1)}"
            raise ValueError(
                f"field {field!r} has {given}, and the task's group_size is {size}: list {size} under 'responses'"
            )
        rewards, logprobs = _rewards(row, size, self.default_reward), _logprobs(row, size)
        rest = {name: value for name, value in row.items() if name not in (*RESPONSES, *REWARDS, LOGPROBS)}
        if look_up(rest, columns.answer_field, None) is None:  # nobody judges
            columns = replace(columns, answer_field="")
        prompt, images = columns.prompt(rest)
        _check_no_images(images)
        ids = prompt_tokens(prompt, tokenizer_of(self.tokenizer, self.task.template_options))
        samples = [
            self._sample(index, ids, *values)
            for index, values in enumerate(zip(responses, rewards, logprobs, strict=True))
        ]
        return FinishedGroup(prompt, tuple(samples))

    def _conversation(self, row: Mapping[str, Any], first: int) -> FinishedGroup:
        """The group in a row whose `messages` have assistant turns, starting at `first`."""
        if self.task.group_size != 1:
            raise ValueError(f"'messages' is one conversation, so group_size must be 1, not {self.task.group_size}")
        if not first:
            raise ValueError("the first of 'messages' is the assistant's; expected a prompt before it")
        messages, tools = row["messages"], row.get("tools") or []
        check_conversation(messages, tools)
        (reward,) = _rewards(row, 1, self.default_reward)
        rest = {name: value for name, value in row.items() if name not in REWARDS}
        columns = replace(Columns.from_task(self.task), prompt_field="messages", answer_field="", reply_prefix="")
        prompt, images = columns.prompt({**rest, "messages": messages[:first]})
        _check_no_images(images)
        if isinstance(prompt.content, str):
            raise ValueError("field 'messages' must be a list of messages")
        tokenizer = tokenizer_of(self.tokenizer, self.task.template_options)
        rendered = [*prompt.content, *messages[first:]]  # with the task's system prompt
        return FinishedGroup(prompt, (conversation_sample(rendered, tools, reward, tokenizer),))

    def _sample(
        self, index: int, prompt_ids: Int32Array, response: Any, reward: float, logprobs: Sequence[float] | None
    ) -> Sample:
        if isinstance(response, str):
            text, ids = response, self.tokenizer.encode(response)
            ids += [self.tokenizer.eos_id] * (not ids or ids[-1] not in self.tokenizer.eos_ids)
        elif problem := ids_problem(f"response {index}", response):
            raise ValueError(problem)
        else:
            text, ids = self.tokenizer.decode(list(response)), list(response)
        return Sample(
            segments=(
                Segment(
                    prompt_ids=prompt_ids,
                    response_ids=np.array(ids, np.int32),
                    logprobs=_given(index, logprobs, len(ids)),
                    versions=unversioned(len(ids)),
                ),
            ),
            status=SampleStatus.COMPLETED,
            finish_reason=FinishReason.STOP,
            reward=reward,
            text=text,
        )

    def _exported(self, rows: Sequence[Mapping[str, Any]]) -> FinishedGroup:
        numbers = [row["sample"] for row in rows]
        if numbers != list(range(len(rows))):
            raise ValueError(
                f"group {rows[0]['group_id']} has the samples {numbers}: rows are missing, or not in order"
            )
        return FinishedGroup(_prompt_of(rows[0]), tuple(map(self._exported_sample, rows)))

    def _exported_sample(self, row: Mapping[str, Any]) -> Sample:
        sample = sample_of(row)
        return replace(
            sample,
            reward=self.default_reward if sample.reward is None else sample.reward,
            segments=tuple(
                replace(segment, versions=unversioned(len(segment.response_ids))) for segment in sample.segments
            ),
        )


def _rows(path: Path) -> Iterator[Placed]:
    """A file's rows, in order. Raises `ConfigError`, and `InvalidGroup` for a row that cannot be read."""
    try:
        if path.suffix == ".json":
            yield from _json_rows(path)
        elif path.suffix == ".parquet" and _is_exported_parquet(path):
            yield from _exported_parquet(path)
        else:
            yield from _table_rows(path)
    except OSError as error:
        raise ConfigError(f"file {str(path)!r} cannot be read: {error.strerror or error}") from error


def _without_gaps(table: Table, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row without the nulls that its table added to objects."""
    return {name: without_nulls(value) for name, value in row.items()} if table.fills_gaps else row


def _table_rows(path: Path) -> Iterator[Placed]:
    with closing(open_table(path, Columns())) as table:
        for number in range(table.rows):
            place = table.place(number)
            try:
                row = table.read(number)
                written = read_lines_row(row) if _is_exported(row) else _without_gaps(table, row)
            except ValueError as error:
                raise InvalidGroup(f"{place}: {error}") from None
            except (LookupError, TypeError) as error:
                raise InvalidGroup(f"{place}: is not a complete row of `rollq export`: {error!r:.200}") from None
            yield place, written


def _json_rows(path: Path) -> Iterator[Placed]:
    """The objects in a JSON file with a list of objects, which is read as a whole."""
    try:
        rows = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"file {str(path)!r} is not JSON: {error}; if it has one object per line, name it .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ConfigError(
            f"file {str(path)!r} does not contain a list of objects; if it has one object per line, name it .jsonl"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidGroup(f"{path}[{number}]: a JSON object is expected, not {type(row).__name__}")
        yield f"{path}[{number}]", row


def _is_exported_parquet(path: Path) -> bool:
    try:
        return VERSION_KEY in (parquet().read_metadata(path).metadata or {})
    except ValueError as error:  # pyarrow raises it for a truncated file
        raise ConfigError(f"file {str(path)!r} is damaged, or is not a Parquet file: {error}") from None


def _exported_parquet(path: Path) -> Iterator[Placed]:
    number = 0
    with parquet().ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                yield f"{path}[{number}]", row
                number += 1


def _group_key(placed: Placed) -> Any:
    place, row = placed
    return (row["task"], row["group_id"]) if _is_exported(row) else place


def _is_exported(row: Mapping[str, Any]) -> bool:
    return all(name in row for name in _EXPORTED)


def _prompt_of(row: Mapping[str, Any]) -> Prompt:
    try:
        return decode_prompt(row["prompt_record"].encode())
    except CorruptFrame as error:
        raise ValueError(str(error)) from None


def _check_no_images(images: Sequence[Any]) -> None:
    if images:
        raise ValueError("the prompt has images, which only `Buffer.insert` takes")


def _first_given(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the fields `names` that a row has."""
    return next((name for name in names if row.get(name) is not None), None)


def _responses(row: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """The field with the responses, and an item for each response: a string, or token ids."""
    field = _first_given(row, RESPONSES)
    if field is None:
        raise ValueError(f"no field {', '.join(map(repr, RESPONSES))}; the row has {sorted(row)[:20]}")
    value = row[field]
    if isinstance(value, str) or _is_flat(value):
        return field, [value]
    if isinstance(value, list) and all(isinstance(item, str | list) for item in value):
        return field, value
    raise ValueError(f"field {field!r} must be a string, token ids, or a list of these")


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int | float) for item in value)


def _rewards(row: Mapping[str, Any], size: int, default: float | None) -> Sequence[float]:
    field = _first_given(row, REWARDS)
    value = default if field is None else row[field]
    if value is None:
        raise ValueError("no field 'reward' or 'rewards'; --reward gives one to samples that have none")
    rewards = value if isinstance(value, list) else [value] * size
    if len(rewards) != size:
        raise ValueError(f"{len(rewards)} rewards for {size} responses")
    return [_number(default if reward is None else reward) for reward in rewards]


def _number(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"a reward is {reward!r:.80}, not a number; --reward fills in missing ones")
    return float(reward)


def _logprobs(row: Mapping[str, Any], size: int) -> Sequence[Sequence[float] | None]:
    """Each response's logprobs; None where they are absent."""
    value = row.get(LOGPROBS)
    if value is None:
        return [None] * size
    lists = [value] if _is_flat(value) else value
    if (
        not isinstance(lists, list)
        or len(lists) != size
        or not all(logprobs is None or _is_flat(logprobs) for logprobs in lists)
    ):
        raise ValueError(f"field {LOGPROBS!r} must have a list of numbers for each of the {size} responses")
    return lists


def _given(index: int, logprobs: Sequence[float] | None, tokens: int) -> Float32Array:
    if logprobs is None:
        return absent_logprobs(tokens)
    if len(logprobs) != tokens:
        raise ValueError(
            f"response {index} has {len(logprobs)} logprobs and {tokens} tokens; with logprobs, give token ids instead "
            "of a text, to which an end-of-sequence token is added"
        )
    return np.array(logprobs, np.float32)
