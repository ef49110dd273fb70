"""What the buffer keeps of each prompt, for orders that go by it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.replies.prompts import PromptStats
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import GroupResult, Lease, Prompt, SampleStatus
from support.any_server import AnyServer
from support.buffer_run import World, make_sample

RULES: dict[str, object] = {"prompt_stats": True, "pass_reward": 0.5, "group_size": 4, "min_valid_samples": 1}


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


def ask(world: World, *rows: int) -> tuple[Lease, ...]:
    """Admit a prompt of each row, and lease them."""
    clock, cursor = world.buffer.clock("math"), int(world.buffer.counts("math").progress["cursor"])
    prompts = [(Prompt(f"row {row}", row=row), cursor + i + 1) for i, row in enumerate(rows)]
    world.buffer.admit("math", prompts, epoch=clock.epoch, cursor=cursor, target=10**6, step=clock.step)
    return world.lease(len(rows))


def judged(
    world: World, lease: Lease, rewards: Sequence[float | None], *, tokens: int = 10, filtered: bool = False
) -> PutOutcome:
    """Put a group whose samples got these rewards; None: its judge failed."""
    version = world.buffer.clock("math").version
    samples = [
        make_sample(version, status="f" if reward is None else "c", reward=reward, tokens=tokens) for reward in rewards
    ]
    (outcome,) = world.buffer.put([GroupResult(lease, tuple(samples), filtered=filtered)])
    return outcome


def test_statistics_are_kept_by_row(world: World) -> None:
    first, second = ask(world.start(math=RULES), 7, 1_000_000)
    judged(world, first, [1.0, 0.5, 0.49, -1.0], tokens=20)
    judged(world, second, [0.0] * 4)
    assert world.buffer.prompt_stats("math", [1_000_000, 3, 7]) == {
        7: PromptStats(tries=1, samples=4, pass_rate=0.5, mean_reward=0.2475, mean_tokens=20.0),
        1_000_000: PromptStats(tries=1, samples=4, pass_rate=0.0, mean_reward=0.0, mean_tokens=10.0),
    }


def test_the_newest_try_weighs_a_quarter_or_more(world: World) -> None:
    world.start(math=RULES)
    rates = []
    for reward in (0.0, 1.0, 1.0, 1.0, 1.0, 0.0):
        judged(world, ask(world, 5)[0], [reward] * 4)
        rates.append(world.buffer.prompt_stats("math", [5])[5].pass_rate)
    assert rates == [0.0, 0.5, pytest.approx(2 / 3, abs=1e-4), 0.75, 0.8125, pytest.approx(0.609375, abs=1e-4)]
    known = world.buffer.prompt_stats("math", [5])[5]
    assert (known.tries, known.samples) == (6, 24)


def test_samples_that_nobody_judged_do_not_count(world: World) -> None:
    world.start(math=RULES)
    judged(world, ask(world, 5)[0], [1.0, None, None, 0.0], tokens=8)
    assert world.buffer.prompt_stats("math", [5])[5] == PromptStats(1, 2, 0.5, 0.5, 8.0)


@pytest.mark.parametrize(
    ("minimum", "rewards", "filtered", "outcome"),
    [
        (1, [1.0] * 4, True, PutOutcome.FILTERED),
        (4, [1.0, 1.0, 1.0, None], False, PutOutcome.FAILED),
    ],
)
def test_filtered_and_failed_groups_count_as_far_as_they_were_judged(
    world: World, minimum: int, rewards: list[float | None], filtered: bool, outcome: PutOutcome
) -> None:
    world.start(math={**RULES, "min_valid_samples": minimum})
    assert judged(world, ask(world, 5)[0], rewards, filtered=filtered) is outcome
    known = world.buffer.prompt_stats("math", [5])[5]
    assert (known.tries, known.samples, known.pass_rate) == (1, sum(reward is not None for reward in rewards), 1.0)


def test_a_group_that_failed_unjudged_leaves_its_prompt_untried(world: World) -> None:
    world.start(math={**RULES, "min_valid_samples": 4})
    assert judged(world, ask(world, 5)[0], [None] * 4) is PutOutcome.FAILED
    assert world.buffer.prompt_stats("math", [5]) == {}


def test_an_interrupted_or_expired_group_counts_once_when_it_is_finished(world: World) -> None:
    world.start(2, math={**RULES, "max_staleness": 0, "partial_rollout": True})
    (lease,) = ask(world, 5)
    mixed = (make_sample(2), *[make_sample(2, status="a")] * 3)
    assert world.buffer.put([GroupResult(lease, mixed)]) == [PutOutcome.ABORTED]
    world.buffer.recycle("math", epoch=1, target=10**6, limit=1)
    (lease,) = world.lease(1)
    assert lease.samples[0].status is SampleStatus.COMPLETED
    assert world.buffer.put([GroupResult(lease, (make_sample(0),) * 4)]) == [PutOutcome.EXPIRED]
    assert world.buffer.prompt_stats("math", [5]) == {}
    world.buffer.recycle("math", epoch=1, target=10**6, limit=1)
    judged(world, world.lease(1)[0], [1.0] * 4)
    assert world.buffer.prompt_stats("math", [5])[5].tries == 1


def test_a_result_that_is_sent_twice_counts_once(world: World) -> None:
    (lease,) = ask(world.start(math=RULES), 5)
    assert judged(world, lease, [1.0] * 4) is PutOutcome.COMPLETED
    assert judged(world, lease, [1.0] * 4) is PutOutcome.DUPLICATE
    assert world.buffer.prompt_stats("math", [5])[5].tries == 1


def test_nothing_is_kept_for_tasks_that_did_not_ask_or_prompts_without_a_row(world: World) -> None:
    world.start(math={**RULES, "prompt_stats": False}, code=RULES)
    judged(world, ask(world, 5)[0], [1.0] * 4)
    world.complete(1, "code")
    assert world.buffer.prompt_stats("math", [5]) == {}
    assert not world.buffer.client.exists(task_keys(world.buffer.run, "code").prompts)


def test_a_group_tells_its_row(world: World) -> None:
    (lease,) = ask(world.start(math=RULES), 5)
    assert world.buffer.inspect("math", lease.group_id)["row"] == "5"


def test_many_rows_are_asked_for_in_chunks(world: World) -> None:
    judged(world, ask(world.start(math=RULES), 2500)[0], [1.0] * 4)
    assert list(world.buffer.prompt_stats("math", range(3000))) == [2500]
    assert world.buffer.prompt_stats("math", []) == {}


def test_xb16_statistics_are_saved_and_restored(world: World, fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    world.start(math=RULES)
    rows = range(600)  # past the size that a server keeps as one small block
    for lease in ask(world, *rows):
        judged(world, lease, [1.0, 0.0, 0.0, 0.0])
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(fresh_server.url, world.buffer.run) as restored:
        restored.restore(tmp_path / "saved")
        assert restored.prompt_stats("math", rows) == world.buffer.prompt_stats("math", rows)
        assert len(restored.prompt_stats("math", rows)) == 600


def test_of_one_step_the_groups_with_the_longest_answers_are_leased_first(world: World) -> None:
    world.start(math={**RULES, "max_staleness": 3})
    for lease, tokens in zip(ask(world, 1, 2, 3), (10, 300, 40), strict=True):
        judged(world, lease, [1.0] * 4, tokens=tokens)
    for row, step in ((3, 2), (1, 1), (3, 1), (2, 1), (9, 1)):
        cursor = int(world.buffer.counts("math").progress["cursor"])
        prompt = Prompt(f"row {row}", row=row)
        world.buffer.admit("math", [(prompt, cursor + 1)], epoch=1, cursor=cursor, target=10**6, step=step)
    leased = [lease for _ in range(5) for lease in world.lease(1)]
    assert [lease.expected_tokens for lease in leased] == [0.0, 300.0, 40.0, 10.0, 40.0]
    assert [lease.step for lease in leased] == [1, 1, 1, 1, 2]


def test_without_statistics_the_order_is_that_of_arrival_and_no_length_is_known(world: World) -> None:
    world.start(math={**RULES, "prompt_stats": False})
    assert [(lease.group_id, lease.expected_tokens) for lease in ask(world, 2, 1)] == [(1, 0.0), (2, 0.0)]
