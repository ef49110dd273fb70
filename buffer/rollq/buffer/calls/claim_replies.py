"""Claims of a step: their requests, and the batches and plans decoded from function replies. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from rollq.buffer.calls.replies.claims import Claimed, ClaimedGroup, Counting, Readiness, Shortfall
from rollq.buffer.common.mappings import filled
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import PipelineOutput

_Counted = tuple[ClaimedGroup, Counting]


class Plan(NamedTuple):
    """A step's plan: groups per task (none before a rank has planned the round), whether the batch was ever delivered,
    the claim round, how often the step was released, and the groups per task up to each part's end."""

    sizes: dict[str, int]
    delivered: bool
    claim_round: int
    releases: int
    parts: Sequence[Mapping[str, int]] = ()

    @property
    def ends(self) -> list[dict[str, int]]:
        """For each part, the groups of every task up to its end."""
        return [{task: part.get(task, 0) for task in self.sizes} for part in self.parts]


class Asked(NamedTuple):
    """A claim's request: a whole batch, or with `so_far` the part that is ready; the groups that the caller has; the
    seed for draws; and the most bytes of prompts and frames to send with the groups."""

    so_far: bool = False
    known: Claimed | None = None
    seed: int = 0
    most_bytes: int = 0

    def known_of(self, task: str) -> int:
        """How many groups of a task the caller has."""
        return sum(group.task == task for group in self.known.groups) if self.known else 0


FIRST_ROUND = Plan({}, delivered=False, claim_round=0, releases=0)


def decode_plan(reply: Any) -> Plan:
    """Decode the plan in a reply to `plan`."""
    sizes, delivered, claim_round, releases, parts = reply
    return Plan(orjson.loads(sizes or b"{}"), bool(delivered), claim_round, releases, [*map(orjson.loads, parts)])


def has_groups(reply: Any) -> bool:
    """Whether the reply to a claim has groups of the batch."""
    return reply[0] in (b"batch", b"open")


def _counted(task: str, reply: Any, known: Claimed | None) -> "list[_Counted]":
    """A task's groups in order, known groups first, each with its counting."""
    before = _known_of(known, task) if known else []
    in_order = [*before, *(claimed_group(task, *fields) for fields in reply[9:])]
    return list(zip(in_order, _counting(reply, len(in_order)), strict=True))


def _lack(step: int, replies: Mapping[str, Any], plan: Plan) -> Shortfall | None:
    """The groups that the batch lacks, if any."""
    is_short = any(reply[0] != b"batch" for reply in replies.values())
    return shortfall_of(step, replies, plan.sizes) if is_short else None


def _exceeds(ends: Sequence[Mapping[str, int]], groups: "Mapping[str, Sequence[_Counted]]") -> bool:
    """Whether a part ends after the groups so far."""
    return any(end > len(groups.get(task, ())) for part in ends for task, end in part.items())


def decode_claimed(step: int, replies: Mapping[str, Any], plan: Plan, known: Claimed | None) -> Claimed | None:
    """Return the batch from its `known` part and the replies to claims in all its tasks (see `claim.lua`).

    None if the replies belong to another round, or if another rank divided more of the batch than these claims saw.
    """
    with_groups = {task: reply for task, reply in replies.items() if has_groups(reply)}
    claim_round, releases = map(max, zip(*(reply[2:4] for reply in with_groups.values()), strict=True))
    if _is_of_other_round(known, claim_round, plan):
        return None
    groups = {task: _counted(task, reply, known) for task, reply in with_groups.items()}
    if _exceeds(plan.ends, groups):
        return None
    ordered, totals = _in_parts(groups, plan.sizes, plan.ends)
    return Claimed(
        step,
        tuple(map(itemgetter(0), ordered)),
        counting=tuple(map(itemgetter(1), ordered)),
        claim_round=claim_round,
        releases=releases,
        planned=plan.sizes,
        parts=totals,
        plan_round=plan.claim_round,
        lack=_lack(step, replies, plan),
    )


def _is_of_other_round(known: Claimed | None, claim_round: int, plan: Plan) -> bool:
    return known is not None and (known.claim_round, known.plan_round) != (claim_round, plan.claim_round)


def _known_of(known: Claimed, task: str) -> list[ClaimedGroup]:
    return [group for group in known.groups if group.task == task]


def _in_parts(
    groups: Mapping[str, list[_Counted]], tasks: Iterable[str], ends: Sequence[Mapping[str, int]]
) -> tuple[list[_Counted], tuple[int, ...]]:
    """All tasks' groups, part by part, then those in no part; and the number of groups up to each part's end."""
    ordered, totals, done = list[_Counted](), list[int](), dict.fromkeys(tasks, 0)
    for part in ends:
        for task, end in part.items():
            ordered += groups.get(task, [])[done[task] : end]
            done[task] = max(done[task], end)
        totals.append(len(ordered))
    for task, first in done.items():
        ordered += groups.get(task, [])[first:]
    return ordered, tuple(totals)


def _counting(reply: Any, count: int) -> list[Counting]:
    """For each of a task's `count` groups, how its tokens' age counts."""
    counting = [Counting(Floors.decode(reply[1].decode()), int(reply[4]))] * count
    for line in reply[5].decode().splitlines():
        first, threshold, floors = line.split(" ", 2)
        counting[int(first) :] = [Counting(Floors.decode(floors), int(threshold))] * (count - int(first))
    return counting


def claimed_group(
    task: str,
    group_id: int,
    oldest: int,
    arrival: int,
    tries: int,
    tokens: int,
    reward: bytes | None,
    payload: bytes,
    nonce: bytes,
    rows: bytes,
    shaped: bytes,
    uses: int,
    probability: bytes,
    *stored: bytes,
) -> ClaimedGroup:
    """Make a group from its description (see `describe_groups`). `stored` holds its prompt and frame, or nothing."""
    numbers = (oldest, arrival, tries, tokens, float(reward or 0))
    pipeline = PipelineOutput.decode(shaped)
    drawn = float(probability) if probability else None
    return ClaimedGroup(task, group_id, *numbers, payload.decode(), nonce.decode(), rows, pipeline, uses, drawn, stored)


def shortfall_of(step: int, replies: Mapping[str, Any], wanted: Mapping[str, int]) -> Shortfall:
    """The shortfall, from claim replies (see `claim.lua`)."""
    short = {task: lacking for task, lacking in _incomplete(replies) if lacking.is_short_of(wanted[task])}
    return Shortfall(
        step,
        ready={task: lacking.ready for task, lacking in short.items()},
        wanted={task: wanted[task] for task in short},
        stragglers=filled({task: lacking.stragglers for task, lacking in short.items()}),
        unarchived=filled({task: lacking.unarchived for task, lacking in short.items()}),
    )


def _incomplete(replies: Mapping[str, Any]) -> Iterator[tuple[str, Readiness]]:
    for task, reply in replies.items():
        if reply[0] not in (b"given_up", b"batch"):
            yield task, Readiness(*(reply[6:9] if has_groups(reply) else reply[1:4]))
