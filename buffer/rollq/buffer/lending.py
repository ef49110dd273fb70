"""The calls of workers that lend samples of their groups to each other."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from rollq.buffer.core import BufferCore, pairs
from rollq.buffer.leasing import decode_lease, fences, leases_by_task
from rollq.buffer.replies import Offer, Offered
from rollq.buffer.rollouts import WHOLE, Lease, Sample, SampleStatus
from rollq.buffer.store.keys import task_keys
from rollq.buffer.wire.payload import decode_kept


class Lending(BufferCore):
    """Samples of a leased group, made by another worker than the one that has the lease.

    What is made of them is salvaged like that of other samples. The result of the group is put by the worker that has
    its lease, and fenced by it.
    """

    def offer(self, offers: Sequence[Offer]) -> list[Offered | None]:
        """Offer samples to other workers, take offers back, and learn what is still offered and what is lent.

        A sample that was offered and is in neither set any more is the caller's again: see `kept`. None for a lease
        that is no longer the caller's. Harmless to repeat.
        """
        answers: dict[int, Offered | None] = {}
        for task in dict.fromkeys(offer.lease.task for offer in offers):
            mine = [index for index, offer in enumerate(offers) if offer.lease.task == task]
            rows = [item for index in mine for item in _row(offers[index])]
            replies = self.call_task("offer", task, *rows)
            for index, (held, offered, lent) in zip(mine, replies, strict=True):
                answers[index] = Offered(_indices(offered), _indices(lent)) if held else None
        return [answers[index] for index in range(len(offers))]

    def borrow(
        self, tasks: Sequence[str], n: int, *, worker: str, version: int, epoch: int, share: float
    ) -> list[Lease]:
        """Borrow up to `n` samples that other workers offer, for weights (`epoch`, `version`), until a deadline.

        `share`: the part of what is offered that is taken at most, from 0 to 1. Each loan is a lease of some samples of
        a group: `renew` and `salvage` it like one, and end it with `end_loans`.
        """
        loans: list[Lease] = []
        for task in tasks:
            if n <= 0:
                break
            nonce = secrets.token_hex(8)
            reply = self.call_task("borrow", task, worker, nonce, epoch, version, n, share)
            named = {fields[0]: fields[-3].decode() for fields in reply if fields[-3]}
            payloads = self.read_payloads(task, named)
            for *fields, borrowed in reply:
                lease = decode_lease(task, nonce, fields, payloads.get(fields[0]))
                # parts are counted for each loan alone
                loans.append(replace(lease, parts=0, borrowed=tuple(sorted(_indices(borrowed)))))
                n -= len(loans[-1].borrowed)
        return loans

    def end_loans(self, loans: Sequence[Lease]) -> int:
        """Give the samples of loans back, finished or not, with all that was salvaged of them.

        Returns how many loans ended now.
        """
        return sum(int(self.call_task("end_loan", task, *fences(mine))) for task, mine in leases_by_task(loans).items())

    def kept(self, lease: Lease) -> tuple[Sample, ...]:
        """The samples of a leased group as the buffer has them now."""
        keys, group_id = task_keys(self.run, lease.task), lease.group_id
        (letters, payload), frames = self.send_all(
            [("HMGET", keys.group(group_id), "letters", "payload"), ("HGETALL", keys.rollout(group_id))]
        )
        stored = {field.decode(errors="replace"): frame for field, frame in pairs(frames)}
        named = {group_id: payload.decode()} if payload else {}
        for frame in self.read_payloads(lease.task, named).values():
            stored[WHOLE] = frame
        known = letters.decode() if letters else SampleStatus.PENDING * len(lease.samples)
        return decode_kept(stored, known, f"group {group_id} of task {lease.task!r}")


def _row(offer: Offer) -> list[str | int]:
    lease = offer.lease
    added, taken_back = (",".join(map(str, indices)) for indices in (offer.added, offer.taken_back))
    return [lease.group_id, lease.attempt, lease.nonce, offer.number, added, taken_back]


def _indices(text: bytes) -> frozenset[int]:
    return frozenset(int(index) for index in text.split(b",") if index)
