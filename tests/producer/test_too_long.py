"""Prompts that workers have found too long are left out at every later pass."""

from functools import partial
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.store.keys import task_keys
from rollq.producer.producer import Producer
from rollq.producer.prompt_records import check_prompts
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler
from support.producer_run import Rows, begin, lease, make_run, producer, prompt_file, put, task_settings, train

ROWS = 6


def test_rows_are_left_out_without_moving_the_others() -> None:
    sampler, whole = Sampler(Rows(10), (3,), 0.0), Sampler(Rows(10), (3,), 0.0).prompts_from(0, 30)
    sampler.rows.leave_out({2, 7})
    left = [pick for pick in whole if pick[0].row not in (2, 7)]
    assert sampler.prompts_from(0, len(left)) == left
    with pytest.raises(InvalidPrompt, match="none of the 10 rows is usable; the last rows are longer"):
        sampler.rows.leave_out(range(10))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize(("limit", "left_out"), [(20, True), (50, False)])
def test_a_row_that_was_dropped_is_not_admitted_again(
    server_url: str,
    run_name: str,
    tmp_path: Path,
    other: bool,
    limit: int,
    left_out: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = prompt_file(tmp_path / "p.jsonl", ROWS)
    task = task_settings(prompts, batch_groups=ROWS, max_staleness=0, max_prompt_tokens=limit)
    make = partial(producer, server_url, run_name, task)
    with make_run(server_url, run_name, task) as buffer, make() as first, make() as second:
        held = begin(buffer)
        first.tick()
        dropped = lease(buffer, 1)[0]
        assert buffer.drop_too_long(dropped, 50, "too long")
        asked = second if other else first
        rows = [row for step in range(1, 4) for row in take_step(buffer, asked, held, step)]
    assert len(rows) > 2 * ROWS
    row = int(str(dropped.prompt.content))
    assert (row not in rows) is left_out
    said = (
        f"1 prompts are longer than max_prompt_tokens = 20 and are left out, 1 so far: {prompts}:{row + 1} (50 tokens)"
    )
    assert (caplog.text.count(said) >= 1) is left_out
    assert set(rows) >= set(range(ROWS)) - {int(str(dropped.prompt.content))}


def take_step(buffer: Buffer, producer: Producer, held: TrainerEpoch, step: int) -> list[int]:
    """The rows that are admitted, made and trained for a step."""
    producer.tick()
    leases = lease(buffer, 1000)
    put(buffer, leases)
    assert train(buffer, held, step, ROWS)
    return [int(str(item.prompt.content)) for item in leases]


def test_groups_of_former_prompts_say_nothing_about_the_new_ones(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    old = task_settings(
        prompt_file(tmp_path / "old.jsonl", ROWS), batch_groups=ROWS, prompt_stats=True, on_prompts_changed="continue"
    )
    new = old.model_copy(update={"prompts": prompt_file(tmp_path / "new.jsonl", ROWS + 1)})
    with make_run(server_url, run_name, old) as buffer:
        held = begin(buffer)
        with PromptFile(old) as file, producer(server_url, run_name, old) as before:
            check_prompts(buffer, "math", file, 0)
            before.tick()
            too_long, *others = lease(buffer, ROWS)
        with PromptFile(new) as file, producer(server_url, run_name, new) as after:
            check_prompts(buffer, "math", file, 0)
            admitted = buffer.counts("math").progress["admitted"]
            assert buffer.drop_too_long(too_long, 50, "too long")
            put(buffer, others)
            after.tick()
            client, keys = buffer.client, task_keys(run_name, "math")
            assert not client.exists(keys.too_long, keys.prompts)
            assert train(buffer, held, 1, ROWS - 1)
            after.tick()
            leases = lease(buffer, 1000)
            put(buffer, leases)
            rows = {int(str(made.prompt.content)) for made in leases if made.group_id > admitted}
            assert {int(row) for row in client.hkeys(keys.prompts)} == rows != set()
