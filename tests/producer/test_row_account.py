"""The account of rows: every row that producers read counts once, in the buffer, with the reason if it is unusable."""

from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.prompts import Unusable, UnusableRow
from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.tickets import open_queue
from rollq.cli.settings.task_settings import EvaluationSettings
from rollq.producer.producer import EvaluationFeed, Producer
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import ProducerSettings
from rollq.producer.usable_rows import UsableRows
from support.buffer_run import World
from support.producer_run import TASK, begin, make_run, producer, task_settings


def prompts(path: Path, rows: int, without_answer: frozenset[int] = frozenset()) -> Path:
    """A file of rows, some of which have no answer."""
    lines = [{"prompt": f"p{row}"} | ({} if row in without_answer else {"answer": row}) for row in range(rows)]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def counted(buffer: Buffer, task: str = TASK) -> tuple[int, ...]:
    """All, read, unusable and too long rows."""
    progress = buffer.counts(task).progress
    return tuple(int(progress.get(name, 0)) for name in ("rows", "rows_read", "rows_unusable", "rows_too_long"))


def test_producers_and_restarts_count_each_row_once(server_url: str, run_name: str, tmp_path: Path) -> None:
    path = prompts(tmp_path / "p.jsonl", 20, frozenset({3, 8, 12}))
    task = task_settings(path, max_bad_rows=0.5, batch_groups=15, max_staleness=1)
    with ExitStack() as stack:
        buffer = stack.enter_context(make_run(server_url, run_name, task))
        begin(buffer)
        assert counted(buffer) == (0, 0, 0, 0)
        for made in [stack.enter_context(producer(server_url, run_name, task)) for _ in range(2)]:
            made.tick()
        stack.enter_context(producer(server_url, run_name, task)).tick()
        assert counted(buffer) == (20, 20, 3, 0)
        (reason,) = buffer.unusable_rows(TASK).values()
        assert reason.rows == 3
        assert reason.first in {f"{path}:{row + 1}" for row in (3, 8, 12)}


def test_rows_that_are_read_in_another_way_begin_a_new_account(server_url: str, run_name: str, tmp_path: Path) -> None:
    path = prompts(tmp_path / "p.jsonl", 20, frozenset({3, 8}))
    task = task_settings(path, max_bad_rows=0.5, batch_groups=6, max_staleness=0)
    with ExitStack() as stack:
        buffer = stack.enter_context(make_run(server_url, run_name, task))
        held = begin(buffer)
        stack.enter_context(producer(server_url, run_name, task)).tick()
        read = counted(buffer)[1]
        assert 6 <= read <= 8
        world = World(buffer)
        world.held = held
        world.put(world.lease(6, TASK))
        buffer.claim(held, 1, {TASK: 6})
        buffer.publish(held, 1, uri="none", digest="d1")
        buffer.commit(held, 1)
        other = task.model_copy(update={"answer_field": ""})
        stack.enter_context(producer(server_url, run_name, other)).tick()
        assert counted(buffer) == (20, 6, 0, 0)
        assert buffer.unusable_rows(TASK) == {}


def test_too_many_unusable_rows_are_seen_after_the_producer_has_ended(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    task = task_settings(prompts(tmp_path / "p.jsonl", 20, frozenset(range(20))))
    with ExitStack() as stack:
        buffer = stack.enter_context(make_run(server_url, run_name, task))
        begin(buffer)
        with pytest.raises(InvalidPrompt, match="max_bad_rows"):
            stack.enter_context(producer(server_url, run_name, task)).tick()
        rows, read, unusable, _ = counted(buffer)
        assert (rows, read) == (20, unusable)
        assert unusable > 0


def test_rows_of_an_evaluation_are_counted(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompts(tmp_path / "p.jsonl", 20))
    asked = EvaluationSettings(
        prompts=prompts(tmp_path / "held_out.jsonl", 30, frozenset({4})), group_size=1, judge="exact_match"
    )
    with make_run(server_url, run_name, task) as buffer, PromptFile(asked) as source:
        buffer.register_task("held_out", asked.as_task())
        begin(buffer)
        for number in range(2):
            buffer.open_batch("held_out", f"{number}/held_out", "eval", step=0)
            feed = EvaluationFeed("held_out", UsableRows(source, 0.05))
            Producer(buffer, open_queue(server_url, run_name), ProducerSettings(), [], [feed]).tick()
        assert counted(buffer, "held_out") == (30, 30, 1, 0)
        assert list(buffer.unusable_rows("held_out").values()) == [Unusable(1, f"{tmp_path}/held_out.jsonl:5")]


def test_reasons_are_bounded(buffer: Buffer) -> None:
    World(buffer).start()
    found = [UnusableRow(row, f"reason {row}", f"p:{row}") for row in range(20)]
    buffer.account_rows("math", "a", rows=50, passed=25, unusable=found)
    buffer.account_rows("math", "a", rows=50, passed=20, unusable=found)
    reasons = buffer.unusable_rows("math")
    assert len(reasons) == 9
    assert reasons["other reasons"] == Unusable(12, "p:8")
    assert counted(buffer, "math") == (50, 25, 20, 0)


def test_a_row_that_is_too_long_counts_once(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(2)
    for leased in world.lease(2):
        buffer.client.hset(f"rollq:{{{buffer.run}:math}}:group:{leased.group_id}", "row", "7")
        buffer.drop_too_long(leased, 5000, "too long")
    assert counted(buffer, "math")[3] == 1
