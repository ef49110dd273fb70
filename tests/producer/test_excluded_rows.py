"""Rows that an operator takes out of a task's prompts: no producer admits them, in this pass and in later ones."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Prompt, Status
from rollq.producer.prompt_records import check_prompts
from rollq.producer.prompts import PromptFile
from support.buffer_run import World
from support.producer_run import TASK, begin, make_run, producer, prompt_file, task_settings
from support.proxy import PASS, Fate, Proxy, Verdict


def rows_of(buffer: Buffer, status: Status = Status.PENDING) -> Counter[int]:
    """How many groups with a status each row has."""
    keys = task_keys(buffer.run, TASK)
    ids = buffer.send("ZRANGE", keys.status(status), 0, -1)
    return Counter(int(buffer.send("HGET", keys.group(int(each)), "row")) for each in ids)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return prompt_file(tmp_path / "p.jsonl", 10)


def test_an_excluded_row_is_skipped_in_every_pass_by_producers_that_run_and_by_new_ones(
    server_url: str, run_name: str, path: Path
) -> None:
    task = task_settings(path, batch_groups=12, max_staleness=1)
    with ExitStack() as stack:
        buffer = stack.enter_context(make_run(server_url, run_name, task))
        held = begin(buffer)
        running = stack.enter_context(producer(server_url, run_name, task))
        with PromptFile(task) as file:
            check_prompts(buffer, TASK, file, 0)
        running.tick()
        before = rows_of(buffer)
        assert sum(before.values()) == 24
        assert buffer.exclude_rows(TASK, [3, 7, 3]) == [3, 7]
        assert buffer.exclude_rows(TASK, [3]) == []
        assert buffer.drop_waiting(TASK, [3, 7]) == before[3] + before[7]
        running.tick()
        after = rows_of(buffer)
        assert sum(after.values()) == 24
        assert set(after) == set(range(10)) - {3, 7}
        world = World(buffer)
        world.held = held
        world.put(world.lease(12, TASK))
        buffer.claim(held, 1, {TASK: 12})
        buffer.publish(held, 1, uri="none", digest="d1")
        buffer.commit(held, 1)
        stack.enter_context(producer(server_url, run_name, task)).tick()
        assert not {3, 7} & set(rows_of(buffer))
        assert buffer.exclude_rows(TASK, [7], undo=True) == [7]
        assert buffer.excluded_rows(TASK).rows == {3}
        texts = [revision.text for revision in buffer.rule_revisions(TASK)[1:]]
        assert texts == [
            "revision 2: excluded_rows 0 -> 2 (with 3, 7) from step 1 on",
            "revision 3: excluded_rows 2 -> 1 (without 7) from step 2 on",
        ]


def test_a_producer_that_does_not_know_of_it_yet_admits_nothing(server_url: str, run_name: str, path: Path) -> None:
    with make_run(server_url, run_name, task_settings(path)) as buffer:
        begin(buffer)
        buffer.record_prompts(TASK, "digest", 10, "", "p.jsonl")
        buffer.exclude_rows(TASK, [4])
        picks = [(Prompt("p", row=row), row + 1) for row in (2, 4)]
        assert buffer.admit(TASK, picks, epoch=1, cursor=0, target=4, step=1).count == 0
        assert buffer.admit(TASK, picks[:1], epoch=1, cursor=0, target=4, step=1).count == 1


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "found while it is read"])
def test_a_task_pauses_while_all_its_usable_rows_are_excluded_and_says_the_way_back(
    server_url: str, run_name: str, path: Path, is_known: bool
) -> None:
    good, bad = path.read_bytes().splitlines(keepends=True)[:-1], b'{"no": "prompt"}\n'
    path.write_bytes(b"".join([*good, bad]))
    task = task_settings(path, batch_groups=12, max_bad_rows=1)
    with make_run(server_url, run_name, task) as buffer, ExitStack() as stack:
        begin(buffer)
        running = stack.enter_context(producer(server_url, run_name, task))
        with PromptFile(task) as file:
            check_prompts(buffer, TASK, file, 0)
        if is_known:
            running.tick()
        buffer.exclude_rows(TASK, range(9))
        buffer.drop_waiting(TASK, range(9))
        running.tick()
        clock = buffer.clock(TASK)
        assert clock.control is Control.PAUSE
        assert clock.control_reason == (
            "no row is left: 1 of 10 cannot be used, and the others are excluded by hand; include a row again: "
            "`rollq groups exclude math ROW --undo`, then `rollq resume --task math`"
        )
        running.tick()
        buffer.exclude_rows(TASK, [4], undo=True)
        buffer.set_control(TASK, Control.RUN)
        running.tick()
        assert set(rows_of(buffer)) == {4}


def test_rows_of_another_file_are_not_hit(server_url: str, run_name: str, path: Path) -> None:
    with make_run(server_url, run_name, task_settings(path)) as buffer:
        begin(buffer)
        with pytest.raises(ConfigError, match="has no prompts yet"):
            buffer.exclude_rows(TASK, [1])
        buffer.record_prompts(TASK, "one", 10, "", "p.jsonl")
        buffer.exclude_rows(TASK, [1, 2])
        buffer.record_prompts(TASK, "other", 10, "", "p.jsonl", revision=1)
        assert buffer.excluded_rows(TASK) == (frozenset(), 2)
        picks = [(Prompt("p", row=1), 1)]
        assert buffer.admit(TASK, picks, epoch=1, cursor=0, target=4, step=1).count == 1
        buffer.record_prompts(TASK, "one", 10, "", "p.jsonl", revision=2)
        assert buffer.excluded_rows(TASK) == (frozenset({1, 2}), 0)


def test_a_lost_reply_does_not_hide_that_rows_were_changed(server_url: str, run_name: str, path: Path) -> None:
    lost: list[bytes] = []

    def judge(command: bytes) -> Verdict:
        if b"exclude_rows" not in command or lost:
            return PASS
        lost.append(command)
        return Verdict(Fate.DROP)

    with make_run(server_url, run_name, task_settings(path)) as buffer:
        buffer.record_prompts(TASK, "digest", 10, "", "p.jsonl")
        port = urlsplit(server_url).port
        assert port
        with Proxy(port, judge) as proxy, Buffer.connect(proxy.url, run_name) as behind:
            assert behind.exclude_rows(TASK, [2, 5]) == [2, 5]
            assert lost
        assert buffer.excluded_rows(TASK).rows == {2, 5}


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([10], "row 10: the prompts of task math have the rows 0 to 9"),
        (list(range(10)), "no row of task math would be left"),
    ],
)
def test_wrong_rows_are_refused(server_url: str, run_name: str, path: Path, rows: list[int], error: str) -> None:
    with make_run(server_url, run_name, task_settings(path)) as buffer:
        buffer.record_prompts(TASK, "digest", 10, "", "p.jsonl")
        with pytest.raises(ConfigError, match=error):
            buffer.exclude_rows(TASK, rows)
        assert buffer.excluded_rows(TASK).rows == frozenset()
