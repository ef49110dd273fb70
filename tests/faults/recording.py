"""Makes rollq's own roles write histories: the calls of the buffer that matter are wrapped before the role starts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from faults.digests import samples_digest, versions_of
from faults.history import Call, History
from rollq.buffer.calls.leasing import Leasing
from rollq.buffer.calls.lending import Lending
from rollq.buffer.calls.replies.leases import Leased, PutOutcome, SalvageOutcome
from rollq.buffer.errors import RollqError, ServerError
from rollq.buffer.values.rollouts import GroupResult, Lease, SamplePart, SampleStatus


@contextmanager
def recorded(history: History, what: str, **facts: Any) -> Iterator[Call]:
    """Record a call. rollq's refusals are failures; whether a call took effect that met no server is unknown."""
    with history.call(what, **facts) as call:
        try:
            yield call
        except ServerError:
            raise
        except RollqError as error:
            call.fail(error=type(error).__name__, message=str(error))
            raise


def record_worker(history: History) -> None:
    """Record what this process leases, borrows, gives back and puts from now on."""
    lease, put, borrow, salvage = Leasing.lease, Leasing.put, Lending.borrow, Leasing.salvage

    def recorded_lease(self: Leasing, *args: Any, **options: Any) -> Leased:
        with recorded(history, "lease") as call:
            found = lease(self, *args, **options)
            call.ok(groups=[(held.task, held.group_id) for held in found.leases])
            return found

    def recorded_put(self: Leasing, results: Sequence[GroupResult]) -> list[PutOutcome]:
        return put_recorded(history, partial(put, self), results)

    def recorded_borrow(self: Lending, *args: Any, **options: Any) -> list[Lease]:
        with recorded(history, "borrow") as call:
            loans = borrow(self, *args, **options)
            call.ok(loans=[(loan.task, loan.group_id, loan.borrowed) for loan in loans])
            return loans

    def recorded_salvage(self: Leasing, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
        given_back = {place: part for place, part in enumerate(parts) if _ends_a_borrowed_sample(part)}
        if not given_back:
            return salvage(self, parts)
        described = [
            (part.lease.task, part.lease.group_id, part.lease.attempt, part.index, samples_digest([part.sample]))
            for part in given_back.values()
        ]
        with recorded(history, "give back", samples=described) as call:
            outcomes = salvage(self, parts)
            call.ok(outcomes=[outcomes[place].value for place in given_back])
            return outcomes

    Lending.borrow = recorded_borrow  # type: ignore[method-assign]
    Leasing.salvage = recorded_salvage  # type: ignore[method-assign]
    Leasing.lease = recorded_lease  # type: ignore[method-assign]
    Leasing.put = recorded_put  # type: ignore[method-assign]


def _ends_a_borrowed_sample(part: SamplePart) -> bool:
    return bool(part.lease.borrowed) and part.sample.status is not SampleStatus.ABORTED


def put_recorded(
    history: History, put: Callable[[Sequence[GroupResult]], list[PutOutcome]], results: Sequence[GroupResult]
) -> list[PutOutcome]:
    """Put results, and record what was sent and what became of it."""
    described = [
        (result.lease.task, result.lease.group_id, samples_digest(result.samples), _oldest(result))
        for result in results
    ]
    made = [(result.lease.attempt, [samples_digest([sample]) for sample in result.samples]) for result in results]
    with recorded(history, "put", results=described, made=made) as call:
        outcomes = put(results)
        call.ok(outcomes=[outcome.value for outcome in outcomes])
        return outcomes


def _oldest(result: GroupResult) -> int | None:
    return min((version for _, version in versions_of(result.samples)), default=None)
