"""Pages of groups: reads a few from each sorted set at a time, so that the work does not grow with the buffer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollq.buffer.calls.group_details import FoundGroup, TrainStep, by_task, past_leases
from rollq.buffer.calls.stored_groups import texts
from rollq.buffer.query.calls import IDS_PER_TRIP, Querying
from rollq.buffer.query.ranking import MOST_SORTED
from rollq.buffer.query.selection import (
    MOST_ROWS,
    Candidate,
    Candidates,
    Filling,
    Page,
    Selection,
    parse_after,
    ranked_page,
)
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status
from rollq.buffer.wire.prompts import decode_prompt


class Paging(Querying):
    """Calls that read groups page by page."""

    def page(self, selection: Selection, *, after: str = "", limit: int = 50) -> Page:
        """Return up to `limit` groups of a selection; unless the selection is sorted, each set's highest scores come
        first. `after` comes from the previous page, and is "" for the first page. A search reads at most `MOST_READ`
        groups, fewer if they are large, so an empty page may still have a next page. Groups that move between pages may
        be missing or repeated. Raises `QueryError`, `StoreLost`.
        """
        limit = max(1, min(limit, MOST_ROWS))
        if selection.is_ranked:
            return ranked_page(self.candidates(selection), selection, self.read_candidates, after=after, limit=limit)
        return self._page_of_sets(selection, *parse_after(after), limit)

    def _page_of_sets(self, selection: Selection, place: int, rank: int, limit: int) -> Page:
        sets = list(self._sets(selection))
        sizes = self._sizes(sets)
        read = self.look if selection.searches_samples else self.glance
        filling = Filling(selection, limit)
        while place < len(sets) and (count := filling.next_groups):
            ids = self._ids_at(sets[place], rank, count) if rank < sizes[place] else []
            if ids:
                filling.add(len(ids), read(sets[place].task, ids))
                rank += len(ids)
            else:
                place, rank = place + 1, 0
        return filling.page(f"{place}.{rank}" if rank < sum(sizes[place:]) else None)

    def candidates(self, selection: Selection) -> Candidates:
        """The groups that a ranked list may show, in the list's order, among the selection's first `MOST_SORTED`
        groups."""
        sets = list(self._sets(selection))
        sizes = self._sizes(sets)
        left, found = MOST_SORTED, list[Candidate]()
        for current, size in zip(sets, sizes, strict=True):
            for rank in range(0, min(size, left), IDS_PER_TRIP):
                ids = self._ids_at(current, rank, min(IDS_PER_TRIP, left - rank))
                for record in self.records(current.task, ids):
                    if (place := selection.place(record, record.samples)) is not None:
                        found.append(Candidate(place, current.task, record.uid))
            left -= min(size, left)
        return Candidates(sorted(found, key=lambda one: one.place), sum(sizes) > MOST_SORTED)

    def read_candidates(self, some: Sequence[Candidate], selection: Selection) -> Iterator[FoundGroup]:
        """The candidates' groups that are still there, with their samples if these are searched."""
        read = self.look if selection.searches_samples else self.glance
        return by_task(read, [(one.task, one.group_id) for one in some])

    def glance(self, task: str, group_ids: Sequence[int]) -> list[FoundGroup]:
        """The groups with these ids that are in the buffer, without their samples. Raises `StoreLost`."""
        keys, now_ms = task_keys(self.run, task), self.server_ms()
        calls = [("inspect", keys.clock, self.incarnation, group_id) for group_id in group_ids]
        hashes = zip(group_ids, map(texts, self.call_all(calls)), strict=True)
        there = [(group_id, fields) for group_id, fields in hashes if "status" in fields]
        steps = self.steps_of(task, {group_id: Status(fields["status"]) for group_id, fields in there})
        return [
            FoundGroup(
                task, group_id, Status(fields["status"]), fields, decode_prompt(fields["prompt"].encode()), (), "",
                past_leases(fields), TrainStep(steps[group_id], None, None) if group_id in steps else None, None,
                now_ms,
            )
            for group_id, fields in there
        ]  # fmt: skip

    def _sets(self, selection: Selection) -> "Iterator[_Set]":
        """A selection's sets. A step's batch is a set too, and includes its groups that are leaving."""
        if selection.step is not None:
            for task in selection.tasks:
                ids = self.groups_of_step(task, selection.step) + self.leaving_of_step(task, selection.step)
                yield _Set(task, None, tuple(dict.fromkeys(ids)))
            return
        for task in selection.tasks:
            for status in selection.statuses:
                yield _Set(task, status)

    def _sizes(self, sets: "Sequence[_Set]") -> list[int]:
        scored = [(task_keys(self.run, each.task), each.status) for each in sets if each.status is not None]
        counts = iter(self.send_all([("ZCARD", keys.status(status)) for keys, status in scored]))
        return [len(each.ids) if each.status is None else int(next(counts)) for each in sets]

    def _ids_at(self, one: "_Set", rank: int, count: int) -> list[int]:
        if one.status is None:
            return list(one.ids[rank : rank + count])
        key = task_keys(self.run, one.task).status(one.status)
        return [int(member) for member in self.send("ZRANGE", key, rank, rank + count - 1, "REV")]


class _Set(NamedTuple):
    """A task's groups with a status, or a batch's groups `ids`."""

    task: str
    status: Status | None
    ids: tuple[int, ...] = ()
