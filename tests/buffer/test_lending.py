"""Samples of a group that another worker makes than the one that has its lease."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.calls.replies.leases import Offer, Offered, PutOutcome, SalvageOutcome
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, GroupResult, Lease, SamplePart, SampleStatus
from support.buffer_run import World, make_sample

KEPT, REFUSED = SalvageOutcome.KEPT, SalvageOutcome.REFUSED


@pytest.fixture
def lent(world: World) -> World:
    """A world with a group of four samples."""
    world.start(math={"group_size": 4, "lease_s": 60, "max_staleness": 4})
    world.admit(1)
    return world


def offer(buffer: Buffer, lease: Lease, number: int, *added: int, back: tuple[int, ...] = ()) -> Offered | None:
    (answer,) = buffer.offer([Offer(lease, number, added, back)])
    return answer


def borrow(world: World, n: int = 8, *, worker: str = "other", version: int = 0, share: float = 1.0) -> list[Lease]:
    epoch = world.buffer.clock("math").epoch
    return world.buffer.borrow("math", n, worker=worker, version=version, epoch=epoch, share=share)


def is_(answer: Offered | None, offered: Sequence[int], lent: Sequence[int]) -> bool:
    return answer is not None and (answer.offered, answer.lent) == (frozenset(offered), frozenset(lent))


def deliver(world: World, loan: Lease, *indices: int, first: int = 0) -> None:
    """Salvage whole samples with a loan."""
    parts = [
        SamplePart(loan, number, index, 0, make_sample(0, tokens=5 + index))
        for number, index in enumerate(indices, start=first)
    ]
    assert world.buffer.salvage(parts) == [KEPT] * len(parts)


def test_a_sample_is_offered_lent_made_and_put_by_the_worker_with_the_lease(lent: World) -> None:
    buffer = lent.buffer
    (lease,) = lent.lease(1)
    assert is_(offer(buffer, lease, 0, 2, 3), [2, 3], [])
    (loan,) = borrow(lent)
    assert (loan.borrowed, loan.group_id, loan.prompt) == ((2, 3), lease.group_id, lease.prompt)
    assert loan.nonce != lease.nonce
    assert is_(offer(buffer, lease, 1), [], [2, 3])
    deliver(lent, loan, 2, 3)
    assert buffer.end_loans([loan]) == 1
    assert is_(offer(buffer, lease, 1), [], [])
    kept = list(buffer.kept(lease, range(4)).values())
    assert [sample.response_tokens for sample in kept] == [0, 0, 7, 8]
    samples = (make_sample(0), make_sample(0), *kept[2:])
    assert buffer.put([GroupResult(lease, samples)]) == [PutOutcome.COMPLETED]
    lent.check()
    assert lent.buffer.counts("math").progress["tokens"] == 3 + 3 + 7 + 8


def test_what_a_borrower_has_made_survives_both_workers(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 1, 3)
    (loan,) = borrow(lent)
    deliver(lent, loan, 3)
    part = SamplePart(loan, 1, 1, 0, make_sample(0, tokens=4, status="a"))
    assert lent.buffer.salvage([part]) == [KEPT]
    lent.run_out([lease])
    lent.buffer.reap("math")
    (again,) = lent.lease(1)
    assert [sample.response_tokens for sample in again.samples] == [0, 4, 0, 8]
    assert again.samples[3].status is SampleStatus.COMPLETED
    lent.check()


def test_parts_of_both_workers_are_counted_apart(lent: World) -> None:
    (lease,) = lent.lease(1)
    mine = [SamplePart(lease, number, 0, 2 * number, make_sample(0, tokens=2, status="a")) for number in range(3)]
    assert lent.buffer.salvage(mine[:1]) == [KEPT]
    offer(lent.buffer, lease, 0, 1)
    (loan,) = borrow(lent)
    theirs = SamplePart(loan, 0, 1, 0, make_sample(0, tokens=4, status="a"))
    assert lent.buffer.salvage([theirs, theirs]) == [KEPT, KEPT]
    assert lent.buffer.salvage(mine) == [KEPT] * 3, "the first is a repeat"
    assert lent.buffer.salvage([theirs]) == [KEPT]
    kept = list(lent.buffer.kept(lease, range(4)).values())
    assert [sample.response_tokens for sample in kept] == [6, 4, 0, 0]


def test_a_borrower_makes_no_other_samples_than_those_of_its_loan(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 1)
    (loan,) = borrow(lent)
    other = SamplePart(loan, 0, 2, 0, make_sample(0, tokens=4))
    assert lent.buffer.salvage([other]) == [REFUSED]
    samples = (make_sample(0),) * 4
    assert lent.buffer.put([GroupResult(loan, samples)]) == [PutOutcome.REFUSED]
    assert lent.buffer.hand_back([loan]) == 0


def test_a_borrower_is_fenced_once_the_lease_has_ended(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    (loan,) = borrow(lent, 1)
    assert lent.buffer.put([GroupResult(lease, (make_sample(0),) * 4)]) == [PutOutcome.COMPLETED]
    assert lent.buffer.renew([loan]).gone == [loan]
    assert lent.buffer.salvage([SamplePart(loan, 0, 0, 0, make_sample(0))]) == [REFUSED]
    assert lent.buffer.end_loans([loan]) == 0
    assert borrow(lent) == [], "what was offered is not any more"
    assert offer(lent.buffer, lease, 1, 0) is None
    lent.check()


def test_a_loan_that_runs_out_gives_its_samples_back(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    (loan,) = borrow(lent)
    deliver(lent, loan, 0)
    assert lent.buffer.renew([loan]).gone == []
    end_loans_at(lent, lease, 1)
    assert is_(offer(lent.buffer, lease, 1), [], [])
    assert lent.buffer.renew([loan]).gone == [loan]
    assert lent.buffer.salvage([SamplePart(loan, 1, 1, 0, make_sample(0))]) == [REFUSED]
    kept = list(lent.buffer.kept(lease, range(4)).values())
    assert [sample.status.value for sample in kept] == ["c", "p", "p", "p"]


def test_no_loan_outlives_a_server_whose_clock_is_set_back(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    borrow(lent)
    end_loans_at(lent, lease, lent.buffer.server_ms() + 3_600_000)
    assert is_(offer(lent.buffer, lease, 1), [], [])


def end_loans_at(world: World, lease: Lease, until_ms: int) -> None:
    """Move the deadline of all loans of a group."""
    key = task_keys(world.buffer.run, "math").group(lease.group_id)
    loans = world.buffer.client.hget(key, "loans")
    assert isinstance(loans, bytes)
    lines = [line.split() for line in loans.decode().splitlines()]
    world.buffer.client.hset(
        key, "loans", "\n".join(f"{nonce} {until_ms} {parts} {of}" for nonce, _, parts, of in lines)
    )


def test_an_offer_that_is_taken_back_is_lent_to_nobody(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1, 2)
    assert is_(offer(lent.buffer, lease, 1, back=(0, 2)), [1], [])
    (loan,) = borrow(lent)
    assert loan.borrowed == (1,)
    assert is_(offer(lent.buffer, lease, 2, back=(1,)), [], [1]), "it is lent already"


def test_a_late_copy_of_an_offer_offers_nothing(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    offer(lent.buffer, lease, 1, back=(0, 1))
    assert is_(offer(lent.buffer, lease, 0, 0, 1), [], [])
    assert borrow(lent) == []


def test_workers_borrow_their_share_of_what_is_offered_and_never_their_own(lent: World) -> None:
    lent.admit(1)
    for lease in lent.lease(2):
        offer(lent.buffer, lease, 0, 0, 1, 2, 3)
    assert borrow(lent, worker="worker") == []
    assert [loan.borrowed for loan in borrow(lent, share=0.25)] == [(0, 1)]
    assert [loan.borrowed for loan in borrow(lent, 3, worker="third")] == [(2, 3), (0,)]
    assert [loan.borrowed for loan in borrow(lent, share=0.1)] == [(1,)]


def test_loans_need_weights_as_new_as_those_of_the_lease(lent: World) -> None:
    lent.buffer.publish(lent.held, 1, uri="u", digest="1")
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0)
    assert borrow(lent, version=0) == []
    assert len(borrow(lent, version=1)) == 1


@pytest.mark.parametrize("control", [Control.PAUSE, Control.STOPPED])
def test_nothing_of_a_paused_task_is_lent(lent: World, control: Control) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0)
    lent.buffer.set_control("math", control, "for the test")
    assert borrow(lent) == []


def test_an_operator_who_moves_a_group_ends_its_loans(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    (loan,) = borrow(lent, 1)
    lent.buffer.order_group("math", lease.group_id, GroupOrder.QUARANTINE)
    assert lent.buffer.renew([loan]).gone == [loan]
    assert borrow(lent) == []
    lent.check()


def test_a_repeated_call_borrows_the_same_samples(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1, 2)
    asked = ("borrow", "math", "other", "nonce", 1, 0, 2, 1)
    first, second = lent.buffer.call_task(*asked), lent.buffer.call_task(*asked)
    assert first == second
    assert [fields[-1] for fields in first] == [b"0,1"]


def test_samples_that_failed_are_given_back_as_such(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 1)
    (loan,) = borrow(lent)
    failed = replace(EMPTY_SAMPLE, status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="the tool broke")
    assert lent.buffer.salvage([SamplePart(loan, 0, 1, 0, failed)]) == [KEPT]
    lent.buffer.end_loans([loan])
    kept = list(lent.buffer.kept(lease, range(4)).values())
    assert (kept[1].status, kept[1].error) == (SampleStatus.FAILED, "the tool broke")


def test_of_two_loans_of_one_group_only_the_one_that_has_ended_is_gone(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0, 1)
    (first,), (second,) = borrow(lent, 1), borrow(lent, 1)
    lent.buffer.end_loans([first])
    assert lent.buffer.renew([first, second]).gone == [first]
    assert lent.buffer.renew([lease, second]).gone == []


def test_only_parts_that_came_after_the_offer_are_read(lent: World) -> None:
    (lease,) = lent.lease(1)
    mine = SamplePart(lease, 0, 0, 0, make_sample(0, tokens=9))
    assert lent.buffer.salvage([mine]) == [KEPT]
    answer = offer(lent.buffer, lease, 0, 2, 3)
    assert answer is not None
    (loan,) = borrow(lent)
    deliver(lent, loan, 2, 3)
    found = lent.buffer.kept(lease, [2, 3], after=answer.parts)
    assert [sample.response_tokens for sample in found.values()] == [7, 8]
    assert lent.buffer.kept(lease, [0], after=answer.parts)[0].response_tokens == 0, "it came before"
    assert lent.buffer.kept(lease, [0])[0].response_tokens == 9


def test_a_loan_whose_reply_was_lost_does_not_hold_for_long(lent: World) -> None:
    (lease,) = lent.lease(1)
    offer(lent.buffer, lease, 0, 0)
    lent.buffer.call_task("borrow", "math", "other", "nonce", 1, 0, 1, 1)
    key = task_keys(lent.buffer.run, "math").group(lease.group_id)
    loans = lent.buffer.client.hget(key, "loans")
    assert isinstance(loans, bytes)
    assert 0 < int(loans.split()[1]) - lent.buffer.server_ms() <= 5000
