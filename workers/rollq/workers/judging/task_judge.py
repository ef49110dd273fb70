"""A task's judge and the reader of its rows, for all rows or for each row separately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollq.buffer.common import exact_json
from rollq.buffer.common.user_functions import inside
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.judging.answers import AnswerReader
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.judges import answer_reader, make_judge, make_parts, reader_of_parts
from rollq.workers.judging.per_row import JudgesByColumn
from rollq.workers.judging.rewards import Answer
from rollq.workers.user_code.calls import UserFunction


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads a prompt's answer for its judge. `readers` has a reader for each value of the column that selects the
    judge, or for "" without such a column. `identity` describes the judges and the column, as a string."""

    readers: Mapping[str, AnswerReader | None]
    identity: str
    by_column: JudgesByColumn | None = None

    def __call__(self, prompt: Prompt) -> None:
        """Raise `ValueError` for a prompt without a judge, or with an answer that the judge cannot use."""
        value = self.by_column.value_of(prompt) if self.by_column else ""
        if read := self.readers[value]:
            read(prompt.answer)

    @property
    def comparing(self) -> str:
        """The key of the first judge that compares texts with the answer; empty without such a judge."""
        names = (f"judge.{value}" if value else "judge" for value, read in self.readers.items() if read)
        return next(names, "")


def row_reader(judge: str | Mapping[str, Any], options: Mapping[str, Any]) -> RowReader:
    """The reader of a task's rows. Raises `ConfigError` for unsupported options."""
    if isinstance(judge, str):
        read = answer_reader(judge, options)
        return RowReader({"": read}, getattr(read, "__qualname__", ""))
    by_column = JudgesByColumn.parse(judge)
    readers: dict[str, AnswerReader | None] = {}
    for value, parts in by_column.judges.items():
        with inside(f"judge.{value}"):
            readers[value] = reader_of_parts(parts)
    return RowReader(readers, exact_json.dumps(judge).decode(), by_column)


def make_task_judge(judge: str | Mapping[str, Any], options: Mapping[str, Any], context: JudgeContext) -> Judge:
    """Make a task's judge, which may be a table. Raises `ConfigError`."""
    if isinstance(judge, str):
        return make_judge(judge, options, context)
    by_column = JudgesByColumn.parse(judge)
    judges: dict[str, Judge] = {}
    for value, parts in by_column.judges.items():
        with inside(f"judge.{value}"):
            judges[value] = make_parts(parts, context)

    async def call(prompt: Prompt, sample: Sample) -> Answer:
        raise AssertionError("the judge of the row is asked")

    async def close() -> None:
        for judge in judges.values():
            await judge.close()

    return Judge(
        f"by {by_column.field}",
        UserFunction.wrap(call, None, quick=False),
        close,
        choose=lambda prompt: judges[by_column.value_of(prompt)],
        others=tuple(judges.values()),
    )
