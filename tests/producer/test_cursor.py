"""The cursor of the prompts is in Redis and moves with the groups it admits, whichever producer asks or dies."""

from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import StoreLost
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import TaskKeys
from rollq.buffer.values.rollouts import Prompt, SampleStatus, Status
from rollq.producer.prompt_order import make_order
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ProducerTask
from support.no_numbers import no_numbers
from support.producer_run import TASK, Rows, begin, lease, make_run, producer, prompt_file, put, task_settings, train

ROWS = 12
BAD = frozenset({3, 8})
SEEDS = (5,)

PROFILE = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example uses a new run
)
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["look", "admit", "die"]), st.integers(0, 1), st.integers(1, 6)),
        st.tuples(
            st.sampled_from(["complete", "fail", "abort", "hand_back", "recycle", "train"]),
            st.just(0),
            st.integers(1, 5),
        ),
    ),
    min_size=10,
    max_size=60,
)


class Interleaving:
    """Two producers as the plain calls that they make, a worker and a trainer, in whatever order one likes.

    A producer looks at the cursor and at the statistics, and admits by what it saw, at once, late, or again and again.
    A dead one has done any part of that, and another starts in its place.
    """

    def __init__(self, buffer: Buffer, task: ProducerTask) -> None:
        self.buffer, self.task = buffer, task
        self.held = begin(buffer)
        self.samplers = [self.sampler(), self.sampler()]
        self.seen: list[tuple[int, list[tuple[Prompt, int]]] | None] = [None, None]
        self.step = 1

    def sampler(self) -> Sampler:
        stats_of = partial(self.buffer.prompt_stats, TASK)
        return Sampler(Rows(ROWS, BAD), SEEDS, 1.0, make_order(self.task, no_numbers), stats_of)

    def look(self, who: int, n: int) -> None:
        cursor = int(self.buffer.counts(TASK).progress["cursor"])
        self.seen[who] = (cursor, self.samplers[who].prompts_from(cursor, n))

    def admit(self, who: int, n: int) -> None:
        seen = self.seen[who]
        if seen is not None:
            cursor, prompts = seen
            # the bound may leave room for some of the prompts only
            target = int(self.buffer.counts(TASK).progress["admitted"]) + n
            self.buffer.admit(TASK, prompts, epoch=1, cursor=cursor, target=target, step=1)

    def die(self, who: int, _: int) -> None:
        self.samplers[who], self.seen[who] = self.sampler(), None

    def complete(self, _: int, n: int) -> None:
        leases = lease(self.buffer, n)
        for item in leases:
            put(self.buffer, [item], reward=float(item.group_id % 2))

    def fail(self, _: int, n: int) -> None:
        put(self.buffer, lease(self.buffer, n), SampleStatus.FAILED)

    def abort(self, _: int, n: int) -> None:
        put(self.buffer, lease(self.buffer, n), SampleStatus.ABORTED)

    def hand_back(self, _: int, n: int) -> None:
        self.buffer.hand_back(lease(self.buffer, n))

    def recycle(self, _: int, n: int) -> None:
        self.buffer.recycle(TASK, epoch=1, target=10**6, limit=n)

    def train(self, _: int, n: int) -> None:
        self.step += train(self.buffer, self.held, self.step, n)


def play(server: EmbeddedServer, deeds: list[tuple[str, int, int]], **changes: object) -> tuple[list[int], int]:
    """Rows of all groups that the deeds admitted to a new run, in order, and the cursor in the end."""
    task = task_settings(Path("none"), max_staleness=100, audit_groups=10**6, **changes)
    with make_run(server.url, f"test-{uuid4().hex[:12]}", task) as buffer:
        interleaving = Interleaving(buffer, task)
        for deed, who, n in deeds:
            getattr(interleaving, deed)(who, n)
        progress = buffer.counts(TASK).progress
        groups = range(1, int(progress["admitted"]) + 1)
        return [int(buffer.inspect(TASK, group_id)["row"]) for group_id in groups], int(progress["cursor"])


@given(deeds=DEEDS)
@PROFILE
def test_sb01_no_prompt_is_skipped_or_doubled_when_producers_die_or_ask_twice(
    server: EmbeddedServer, deeds: list[tuple[str, int, int]]
) -> None:
    rows, cursor = play(server, deeds)
    expected = Sampler(Rows(ROWS, BAD), SEEDS, 1.0).prompts_from(0, len(rows))
    assert rows == [prompt.row for prompt, _ in expected]
    assert cursor == (expected[-1][1] if expected else 0)


@given(deeds=DEEDS)
@PROFILE
def test_sb01_the_curriculum_takes_no_prompt_twice_in_a_pass_and_every_new_one(
    server: EmbeddedServer, deeds: list[tuple[str, int, int]]
) -> None:
    rows, cursor = play(server, deeds, prompt_order="curriculum")
    places = iter([prompt.row for prompt, _ in Sampler(Rows(ROWS), SEEDS, 1.0).prompts_from(0, cursor)])
    assert all(row in places for row in rows), "the order of places, some of them passed over"
    first_pass = [prompt.row for prompt, after in Sampler(Rows(ROWS, BAD), SEEDS, 1.0).prompts_from(0, ROWS)]
    assert rows[: ROWS - len(BAD)] == first_pass[: min(len(rows), ROWS - len(BAD))]


def test_the_deeds_reach_later_passes_and_lost_races(server: EmbeddedServer) -> None:
    """What the properties above are worth: an interleaving with a race, a late call, a death and a second pass."""
    deeds = [
        ("look", 0, 6), ("look", 1, 6), ("admit", 1, 4), ("admit", 0, 6), ("admit", 1, 4), ("die", 0, 1),
        ("abort", 0, 2), ("fail", 0, 1), ("recycle", 0, 2), ("look", 0, 6), ("complete", 0, 3), ("admit", 0, 6),
        ("train", 0, 2), ("look", 1, 6), ("admit", 1, 6),
    ]  # fmt: skip
    rows, cursor = play(server, deeds)
    assert len(rows) > ROWS - len(BAD)
    assert cursor > ROWS


def test_two_producers_that_saw_the_same_cursor_admit_once(server: EmbeddedServer) -> None:
    """They saw other statistics, and so chose other prompts: whose call comes first decides, the other looks again."""
    task = task_settings(Path("none"), prompt_order="curriculum", max_staleness=100)
    with make_run(server.url, f"test-{uuid4().hex[:12]}", task) as buffer:
        two = Interleaving(buffer, task)
        two.look(0, ROWS)
        two.admit(0, ROWS)
        two.look(0, 4)
        two.complete(0, ROWS)
        two.look(1, 4)
        assert two.seen[0] != two.seen[1], "by now some prompts are known to be too easy"
        two.admit(1, 4)
        admitted = buffer.counts(TASK).progress["admitted"]
        two.admit(0, 4)
        assert buffer.counts(TASK).progress["admitted"] == admitted


def test_xs01_the_dataset_continues_where_it_was_after_groups_of_the_pools(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 40), batch_groups=4)
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        held = begin(buffer)
        made.tick()
        put(buffer, lease(buffer, 4))
        put(buffer, lease(buffer, 4), SampleStatus.ABORTED)
        made.tick()
        assert buffer.counts(TASK).statuses[Status.PENDING] == 4, "the pool's groups, sampled again"
        assert buffer.counts(TASK).progress["cursor"] == 8
        assert train(buffer, held, 1, 4)
        made.tick()
        rows = [int(buffer.inspect(TASK, group_id)["row"]) for group_id in range(1, 13)]
    with PromptFile(task) as source:
        assert rows == [prompt.row for prompt, _ in Sampler(source, (0,), 1.0).prompts_from(0, 12)]


def test_a_producer_leaves_out_what_its_curriculum_finds_too_hard(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 8), prompt_order="curriculum", curriculum_high=1.0)
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        held = begin(buffer)
        made.tick()
        for item in lease(buffer, 8):  # a whole pass
            put(buffer, [item], reward=float(int(str(item.prompt.content)) % 2))
        assert train(buffer, held, 1, 4)
        assert train(buffer, held, 2, 4)
        made.tick()
        asked = [int(str(item.prompt.content)) for item in lease(buffer, 8)]
    assert set(asked) == {1, 3, 5, 7, 4}, "each pass tries a fifth of the others again: row 4 in the second"
    assert asked.count(4) == 1


def test_xs03_a_prompt_becomes_one_group_of_group_size_samples(buffer: Buffer) -> None:
    """In the model systems the sampler repeats a prompt k times, and sample j of group g has the id g * k + j.

    Here the group is the unit, and repeats its prompt by itself: a sample is (g, j), which that number is short for.
    """
    task = task_settings(Path("none"), group_size=3)
    buffer.create_run()
    buffer.register_task(TASK, task)
    begin(buffer)
    prompts = Sampler(Rows(ROWS), SEEDS, 1.0).prompts_from(0, 2)
    buffer.admit(TASK, prompts, epoch=1, cursor=0, target=10, step=1)
    first, second = lease(buffer, 2)
    assert (first.group_id, second.group_id) == (1, 2)
    assert [len(first.samples), len(second.samples)] == [3, 3]
    assert [first.prompt, second.prompt] == [prompt for prompt, _ in prompts]
    assert len({group.group_id * 3 + j for group in (first, second) for j in range(3)}) == 6


def test_xs04_a_run_without_a_state_begins_at_the_front_and_a_lost_state_is_noticed(
    server_url: str, run_name: str, tmp_path: Path
) -> None:
    """The model systems warn when their state file is missing, and begin anew. So does a new run, without a warning.

    A run whose state was lost is something else: to begin anew would train old prompts again without a word.
    """
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 40))
    with producer(server_url, run_name, task) as made, make_run(server_url, run_name, task) as buffer:
        assert buffer.counts(TASK).progress.get("cursor", 0) == 0
        begin(buffer)
        made.tick()
        assert buffer.counts(TASK).progress["cursor"] == 8
        buffer.client.delete(TaskKeys(run_name, TASK).clock)
        with pytest.raises(StoreLost):
            made.tick()
