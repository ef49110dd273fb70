"""The calls with which workers lend each other samples of their groups."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace

from rollq.buffer.calls.core import pairs
from rollq.buffer.calls.leasing import Leasing, decode_lease, fences, indices_by_task, leases_by_task, named_payloads
from rollq.buffer.calls.replies.leases import Offer, Offered
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE, Lease, Sample, SampleStatus
from rollq.buffer.wire.group_fields import decode_kept


class Lending(Leasing):
    """Samples of a leased group that another worker makes for the lease holder.

    The borrower salvages parts as it does for its other samples. The lease holder puts the group's result, which the
    lease fences.
    """

    def offer(self, offers: Sequence[Offer]) -> list[Offered | None]:
        """Offer samples to other workers and take offers back; returns which samples are still offered, and which are
        lent.

        An offered sample that has left both sets is the caller's again: see `kept`. Returns None in place of an offer
        whose lease is no longer the caller's. Harmless to repeat.
        """
        answers: dict[int, Offered | None] = {}
        for task, of_task in indices_by_task(offers).items():
            rows = [item for index in of_task for item in _row(offers[index])]
            replies = self.call_task("offer", task, *rows)
            for index, (held, offered, lent, parts) in zip(of_task, replies, strict=True):
                answers[index] = Offered(_indices(offered), _indices(lent), parts) if held else None
        return [answers[index] for index in range(len(offers))]

    def borrow(self, task: str, n: int, *, worker: str, version: int, epoch: int, share: float) -> list[Lease]:
        """Borrow up to `n` samples of a task that other workers offer, for weights (`epoch`, `version`).

        `share`, from 0 to 1, is the largest part of the offers to take. Each loan is a lease of some of a group's
        samples: `renew` and `salvage` it like any lease, and end it with `end_loans`.
        """
        nonce, loans = secrets.token_hex(8), list[Lease]()
        reply = self.call_task("borrow", task, worker, nonce, epoch, version, n, share)
        payloads = self.read_payloads(task, named_payloads(reply))
        for *fields, borrowed in reply:
            lease = decode_lease(task, nonce, fields, payloads.get(fields[0]))
            # parts are counted for each loan alone
            loans.append(replace(lease, parts=0, borrowed=tuple(sorted(_indices(borrowed)))))
        gone = self.renew(loans).gone  # confirms that the leases have arrived
        return [loan for loan in loans if loan not in gone]

    def offered(self, task: str) -> bool:
        """Whether samples of any group in a task are offered."""
        return bool(self.send("ZCARD", task_keys(self.run, task).offers))

    def end_loans(self, loans: Sequence[Lease]) -> int:
        """Give back the loans' samples, finished or not, with all salvaged parts.

        Returns how many loans ended now.
        """
        return sum(
            int(self.call_task("end_loan", task, *fences(of_task))) for task, of_task in leases_by_task(loans).items()
        )

    def kept(self, lease: Lease, indices: Collection[int], after: int = 0) -> dict[int, Sample]:
        """Return a leased group's samples as they are in the buffer now, by index.

        Skips the group's first `after` parts; the later parts must hold all tokens of these samples.
        """
        keys, group_id, size = task_keys(self.run, lease.task), lease.group_id, len(lease.samples)
        group = keys.group(group_id)
        letters, parts, payload = self.send("HMGET", group, "letters", "parts", "payload")
        stored = self._stored(keys.rollout(group_id), range(size + after, size + int(parts or 0)) if after else None)
        named = {group_id: payload.decode()} if payload and not after else {}
        for frame in self.read_payloads(lease.task, named).values():
            stored[WHOLE] = frame
        present = letters.decode() if letters else SampleStatus.PENDING * size
        wanted = "".join(letter if i in indices else SampleStatus.PENDING for i, letter in enumerate(present))
        samples = decode_kept(stored, wanted, f"group {group_id} of task {lease.task!r}")
        return {index: samples[index] for index in indices}

    def _stored(self, rollout: str, fields: range | None) -> dict[str, bytes]:
        """These fields of a group's frames, or all fields."""
        if fields is None:
            (frames,) = self.send_all([("HGETALL", rollout)])
            return {field.decode(errors="replace"): frame for field, frame in pairs(frames)}
        replies = self.send("HMGET", rollout, *fields) if fields else []
        return {str(field): frame for field, frame in zip(fields, replies, strict=True) if frame is not None}


def _row(offer: Offer) -> list[str | int]:
    lease = offer.lease
    added, taken_back = (",".join(map(str, indices)) for indices in (offer.added, offer.taken_back))
    return [lease.group_id, lease.attempt, lease.nonce, offer.number, added, taken_back]


def _indices(text: bytes) -> frozenset[int]:
    return frozenset(int(index) for index in text.split(b",") if index)
