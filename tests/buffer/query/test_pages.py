"""`Buffer.page` on real servers: every group of a selection comes once, and no page reads more than it may."""

from collections.abc import Iterator

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import QueryError
from rollq.buffer.query import selection
from rollq.buffer.query.selection import SEARCHED_PER_TRIP, Page, Selection
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Sample, SampleStatus, Status
from support.any_server import AnyServer
from support.buffer_run import World, make_sample


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    """Two tasks: 12 groups each, two of which are trained, two claimed, one failed, and three pending."""
    with Buffer.connect(any_server.url, run_name) as buffer:
        world = World(buffer).start(math={"max_staleness": 4}, code={"max_staleness": 4})
        for task in ("math", "code"):
            world.complete(4, task)
        world.train(1, math=2, code=2)
        world.claim(2, math=2, code=2)
        for task in ("math", "code"):
            world.admit(8, task)
            *done, broken = world.lease(5, task)
            sample = make_sample(1, text=f"Answers of {task}")
            buffer.put([GroupResult(lease, (sample, sample)) for lease in done])
            buffer.put(
                [
                    GroupResult(
                        broken, (Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="no reward"),) * 2
                    )
                ]
            )
        yield world


def listed(world: World, selection: Selection, limit: int) -> list[list[tuple[str, int]]]:
    """The groups of each page."""
    found = list[list[tuple[str, int]]]()
    after: str | None = ""
    while after is not None:
        page = world.buffer.page(selection, after=after, limit=limit)
        found.append([(group.task, group.group_id) for group in page.groups])
        after = page.after
    return found


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
def test_every_group_comes_once_by_task_and_status(world: World, limit: int) -> None:
    found = listed(world, Selection(("math", "code"), (Status.COMPLETED, Status.FAILED, Status.PENDING)), limit)
    assert all(len(page) <= limit for page in found)
    together = [group for page in found for group in page]
    numbers = [8, 7, 6, 5, 9, 12, 11, 10]
    assert sorted(together) == sorted((task, number) for task in ("math", "code") for number in numbers)
    assert together[4] == ("math", 9)
    assert {task for task, _ in together[:8]} == {"math"}


def test_a_group_comes_with_its_numbers_and_without_its_samples(world: World) -> None:
    (group,) = world.buffer.page(Selection(("math",), (Status.FAILED,))).groups
    (looked,) = world.buffer.look("math", [group.group_id])
    assert group.samples == ()
    assert (group.fields, group.prompt, group.leases) == (looked.fields, looked.prompt, looked.leases)
    claimed, _ = world.buffer.page(Selection(("math",), (Status.CLAIMED,))).groups
    assert claimed.batch is not None
    assert claimed.batch.step == 2


def test_the_groups_of_a_step_are_those_of_its_batch(world: World) -> None:
    both = tuple(Status)
    assert listed(world, Selection(("math", "code"), both, step=1), 3) == [
        [("math", 1), ("math", 2), ("code", 1)], [("code", 2)],
    ]  # fmt: skip
    assert listed(world, Selection(("math",), (Status.CLAIMED,), step=1), 3) == [[]]
    assert listed(world, Selection(("math",), both, step=3), 3) == [[]]


def test_a_search_reads_a_bounded_number_of_groups(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_READ", 5)
    every = Selection(("math", "code"), tuple(Status), text="ANSWERS of code")
    found, after = list[int](), ""
    for _ in range(24):
        page = world.buffer.page(every, after=after)
        assert page.read <= 5
        found += [group.group_id for group in page.groups]
        if page.after is None:
            break
        after = page.after
    assert sorted(found) == [5, 6, 7, 8]
    by_prompt = listed(world, Selection(("math",), tuple(Status), prompt="MATH 3"), 50)
    assert [group for page in by_prompt for group in page] == [("math", 4)]


def test_a_search_through_large_samples_reads_fewer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_READ_BYTES", 1)
    every = Selection(("math",), (Status.COMPLETED, Status.ARCHIVED), text="answers")
    page = world.buffer.page(every)
    assert (page.read, len(page.groups)) == (SEARCHED_PER_TRIP, 4)
    assert world.buffer.page(every, after=page.after or "").read == 2


@pytest.mark.parametrize("after", ["x", "1", "1.", "-1.0", "1.2.3", "9999999999.0"])
def test_a_place_that_no_page_returned_is_refused(world: World, after: str) -> None:
    with pytest.raises(QueryError, match="pass the value from the previous page"):
        world.buffer.page(Selection(("math",), (Status.FAILED,)), after=after)


def test_a_place_beyond_the_end_is_the_end(world: World) -> None:
    assert world.buffer.page(Selection(("math",), (Status.FAILED,)), after="7.0") == Page((), 0, None)
