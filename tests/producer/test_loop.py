import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from producer_world import (
    TASK,
    begin,
    lease,
    make_run,
    order,
    producer,
    prompt_file,
    put,
    task_settings,
    train,
)

from rollq.buffer.errors import InvalidPrompt, StoreLost
from rollq.buffer.replay import Buffer
from rollq.buffer.schema import SampleStatus, Status
from rollq.buffer.server import EmbeddedServer
from rollq.buffer.tickets import open_queue, tickets_queued
from rollq.producer.loop import Producer


@contextmanager
def running(*producers: Producer) -> Iterator[None]:
    """Producers at work in threads; what one raises fails the test."""
    stop, errors = threading.Event(), []

    def work(each: Producer) -> None:
        try:
            each.run(stop)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(each,)) for each in producers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def wait_for(buffer: Buffer, **statuses: int) -> None:
    """Wait until the task's counts are these."""
    with buffer.events() as events:
        while True:
            counts = buffer.counts(TASK).statuses
            if all(counts[Status(name)] == count for name, count in statuses.items()):
                return
            events.wait(0.2)


def test_nothing_is_scheduled_before_a_trainer_begins(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        made.tick()
        assert buffer.counts(TASK).statuses[Status.PENDING] == 0


def test_prompts_of_all_allowed_steps_are_admitted_in_order_with_a_ticket_each(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        begin(buffer)
        made.tick()
        made.tick()
        assert tickets_queued(open_queue(server_url, run_name)) == 8
        leases = lease(buffer, 100)
        assert [item.prompt.content for item in leases] == order(task, 8)
        assert [item.step for item in leases] == [1, 1, 1, 1, 2, 2, 2, 2]
        assert buffer.counts(TASK).progress["cursor"] == 8


def test_tickets_are_for_many_groups_by_setting(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20), batch_groups=5)
    with (
        producer(server_url, run_name, task, groups_per_job=4) as made,
        make_run(server_url, run_name, task) as buffer,
    ):
        begin(buffer)
        made.tick()
        assert tickets_queued(open_queue(server_url, run_name)) == 3


def test_a_new_version_lets_the_next_step_be_scheduled(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        held = begin(buffer)
        made.tick()
        put(buffer, lease(buffer, 4))
        assert train(buffer, held, 1, 4)
        made.tick()
        counts = buffer.counts(TASK)
        assert (counts.statuses[Status.PENDING], counts.progress["cursor"]) == (8, 12)


def test_filtered_and_failed_groups_are_replaced(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        begin(buffer)
        made.tick()
        put(buffer, lease(buffer, 2), filtered=True)
        put(buffer, lease(buffer, 1), SampleStatus.FAILED)
        made.tick()
        counts = buffer.counts(TASK)
        assert (counts.statuses[Status.PENDING], counts.progress["cursor"]) == (8, 11)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_an_aborted_group_is_rolled_again_before_new_prompts(
    server_url: str, run_name: str, tmp_path: Path, strategy: str
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20), max_staleness=0)
    with (
        producer(server_url, run_name, task, strategy=strategy) as made,
        make_run(server_url, run_name, task) as buffer,
    ):
        begin(buffer)
        made.tick()
        put(buffer, lease(buffer, 3), SampleStatus.ABORTED)
        made.tick()
        counts = buffer.counts(TASK)
        assert (counts.statuses[Status.PENDING], counts.statuses[Status.ABORTED]) == (4, 0)
        assert counts.progress["cursor"] == 4


def test_expired_groups_are_rolled_again_by_the_async_strategy(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20), max_staleness=0)
    with (
        producer(server_url, run_name, task, over_sample=0.5) as made,
        make_run(server_url, run_name, task) as buffer,
    ):
        held = begin(buffer)
        made.tick()
        put(buffer, lease(buffer, 6))
        assert train(buffer, held, 1, 4)
        made.tick()
        counts = buffer.counts(TASK)
        assert (counts.statuses[Status.EXPIRED], counts.statuses[Status.PENDING]) == (0, 6)
        assert counts.progress["cursor"] == 6 + 4


def test_two_producers_neither_over_schedule_nor_skip_a_prompt(server_url: str, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 37), batch_groups=16)
    steps, seen = 12, dict[int, str]()
    with ExitStack() as stack:
        pair = [stack.enter_context(producer(server_url, run_name, task)) for _ in range(2)]
        buffer = stack.enter_context(make_run(server_url, run_name, task))
        held = begin(buffer)
        events = stack.enter_context(buffer.events())
        stack.enter_context(running(*pair))
        step = 1
        while step <= steps:
            if leases := lease(buffer, 7):
                seen |= {item.group_id: str(item.prompt.content) for item in leases}
                put(buffer, leases)
            counts = buffer.counts(TASK)
            live = (Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.CLAIMED)
            outstanding = counts.progress["consumed"] + sum(counts.statuses[status] for status in live)
            assert outstanding <= 16 * (counts.clock.version + 2)
            if train(buffer, held, step, 16):
                step += 1
            elif not leases:
                events.wait(0.2)
        assert buffer.counts(TASK).unaccounted == 0
    assert [seen[group_id] for group_id in sorted(seen)] == order(task, len(seen))
    assert sorted(seen) == list(range(1, len(seen) + 1))
    assert len(seen) >= steps * 16


def test_bad_rows_are_passed_over_and_the_rest_goes_on(server_url: str, run_name: str, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 10)
    path.write_bytes(path.read_bytes() + b"{not json\n\xff\xfe\n" + b'{"other": 1}\n' * 3)
    task = task_settings(path, batch_groups=10)
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        begin(buffer)
        made.tick()
        assert sorted(str(item.prompt.content) for item in lease(buffer, 100)) == sorted([*map(str, range(10))] * 2)


def test_a_bad_row_ends_the_producer_by_setting(server_url: str, run_name: str, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 3)
    path.write_bytes(path.read_bytes() + b"{not json\n")
    task = task_settings(path, on_bad_prompt="fail")
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        begin(buffer)
        with pytest.raises(InvalidPrompt, match=r"p\.jsonl:4: not JSON"):
            made.run(threading.Event())


def test_a_producer_outlives_a_restart_of_the_server(
    fresh_server: EmbeddedServer, run_name: str, tmp_path: Path
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with (
        producer(fresh_server.url, run_name, task) as made,
        make_run(fresh_server.url, run_name, task) as buffer,
        running(made),
    ):
        held = begin(buffer)
        wait_for(buffer, pending=8)
        fresh_server.stop()
        fresh_server.start()
        put(buffer, lease(buffer, 4))
        assert train(buffer, held, 1, 4)
        wait_for(buffer, pending=8)


def test_a_flushed_server_ends_the_producer(fresh_server: EmbeddedServer, run_name: str, tmp_path: Path) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(fresh_server.url, run_name, task) as made, make_run(fresh_server.url, run_name, task) as buffer:
        begin(buffer)
        made.tick()
        buffer.client.flushall()
        with pytest.raises(StoreLost):
            made.run(threading.Event())


def test_a_full_server_stops_admission_and_lets_go_when_it_has_drained(
    fresh_server: EmbeddedServer, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 20))
    with producer(fresh_server.url, run_name, task) as made, make_run(fresh_server.url, run_name, task) as buffer:
        begin(buffer)
        used = int(buffer.client.info("memory")["used_memory"])
        buffer.client.config_set("maxmemory", int(used / 0.85))
        made.tick()
        assert buffer.counts(TASK).statuses[Status.PENDING] == 0
        assert "of maxmemory" in caplog.text
        buffer.client.config_set("maxmemory", used * 10)
        made.tick()
        assert buffer.counts(TASK).statuses[Status.PENDING] == 8
