"""What all workers can do together."""

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import Fleet
from rollq.buffer.errors import StoreLost
from support.buffer_run import World


@pytest.fixture
def buffer(world: World) -> Buffer:
    return world.start().buffer


def join(buffer: Buffer, worker: str, places: int = 100, *, load: float = 50.0, tokens_per_s: float = 0.0) -> Fleet:
    return buffer.join_fleet(worker, places, load=load, tokens_per_s=tokens_per_s)


def silence(buffer: Buffer, worker: str) -> None:
    """Have a worker's last word be an hour old."""
    buffer.client.zincrby(f"rollq:{{{buffer.run}}}:fleet_seen", -3_600_000, worker)


def test_a_worker_counts_once_with_what_it_has_said_last(any_server: None, buffer: Buffer) -> None:
    assert join(buffer, "a") == Fleet(workers=1, new_places=100, load=50)
    assert join(buffer, "a", 64, load=8, tokens_per_s=1000.4) == Fleet(1, 64, 1000, 0, 8)
    assert join(buffer, "b", 32, load=20) == Fleet(2, 64, 1000, 32, 28)
    assert join(buffer, "a", 64, load=8) == Fleet(2, 0, 0, 96, 28)


def test_a_worker_that_takes_no_groups_counts_for_nothing(buffer: Buffer) -> None:
    join(buffer, "a", tokens_per_s=7)
    assert join(buffer, "b", 0, load=99, tokens_per_s=99) == Fleet(1, 100, 7, 0, 50)
    assert join(buffer, "a", 0) == Fleet()


def test_a_worker_that_says_nothing_more_is_left_out(buffer: Buffer) -> None:
    for name in ("a", "b", "c"):
        join(buffer, name, tokens_per_s=10)
    silence(buffer, "a")
    assert join(buffer, "b", tokens_per_s=10) == Fleet(2, 200, 20, 0, 100)
    assert join(buffer, "a", tokens_per_s=10) == Fleet(3, 300, 30, 0, 150)  # it was only slow


def test_many_silent_workers_are_left_out_by_and_by(buffer: Buffer) -> None:
    for number in range(250):
        join(buffer, f"w{number}")
        silence(buffer, f"w{number}")
    counts = [join(buffer, "alive").workers for _ in range(3)]
    assert counts[-1] == 1


def test_the_mean_load_is_that_of_the_workers_that_take_groups(buffer: Buffer) -> None:
    assert Fleet().mean_load == 0.0
    join(buffer, "a", load=10)
    assert join(buffer, "b", load=31).mean_load == 20.5


def test_the_groups_under_way_are_those_that_wait_and_those_that_are_leased(world: World) -> None:
    world.start(math={}, code={})
    world.admit(5, "math")
    world.admit(3, "code")
    world.lease(2)
    both = world.buffer.under_way(["math", "code"])
    assert (both.pending, both.running) == (6, 2)
    one = world.buffer.under_way(["code"])
    assert (one.pending, one.running) == (3, 0)


def test_the_fleet_of_a_run_that_is_gone_is_refused(buffer: Buffer) -> None:
    buffer.client.delete(f"rollq:{{{buffer.run}}}:run")
    with pytest.raises(StoreLost):
        join(buffer, "a")
