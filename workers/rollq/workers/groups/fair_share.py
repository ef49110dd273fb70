"""Decides how many of the fleet's groups a worker may hold. Pure.

Groups are shared in proportion to workers' capacities, so all workers end at about the same time. The number of groups
under way does not change with a lease, so workers that ask at the same moment agree on it.

Shares that are not whole numbers leave a remainder. Workers take the remainder one group at a time, the worker with the
largest fraction first. After a while, workers that gain speed from more samples take the remaining groups beyond their
shares. This limits how long groups wait because facts about the fleet are outdated, or because workers lack places for
their shares. A fully used worker leaves these groups to the next worker with a place.
"""

from math import ceil, floor

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies.tasks import UnderWay

NOISE = 0.1
"""A share that is less than this below a whole number of groups counts as that number."""
ALIKE = 0.08
"""Workers whose measured speeds differ by less than this count as equally fast."""
REST_S = 0.1
"""Workers take the remainder within this many seconds: the larger the fraction of a group that a worker is owed, the
sooner it asks."""
MOST_DOUBLINGS = 30
PATIENCE_S = 1.0
"""After this many seconds, a worker may take its share of the waiting groups, at least one. After each further such
period, it may take twice as many."""
LEAST_GAIN = 0.5
"""Only workers with at least this gain take such groups; see `EngineSpeed.gain`."""


def counted_speed(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The speed that counts for a worker with these places: the worker's speed, or the fleet's mean speed for as many
    places if the two are close."""
    if not fleet.tokens_per_s:
        return tokens_per_s
    usual = places * fleet.tokens_per_s / fleet.measured_places
    return usual if abs(tokens_per_s - usual) < ALIKE * usual else tokens_per_s


def share_of(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The share of all work, from 0 to 1, for a worker with these places and this speed (0: unknown).

    A worker with unknown speed counts at the other workers' speed per place.
    """
    pace = fleet.tokens_per_s / fleet.measured_places if fleet.tokens_per_s else 1.0
    own_speed = tokens_per_s or places * pace
    everyone = fleet.tokens_per_s + fleet.new_places * pace
    return min(1.0, own_speed / everyone) if everyone else 1.0


def allowance(under_way: UnderWay, held: int, share: float, waited_s: float, gain: float = 1.0) -> int:
    """The number of pending groups that a worker with `held` groups may take now. A worker without groups may take one.

    `waited_s` is how many seconds it has been denied pending groups. For `gain`, see `EngineSpeed.gain`.
    """
    owed = (under_way.pending + under_way.running) * share
    sure = floor(owed + NOISE)
    if held < max(1, sure):
        return min(under_way.pending, max(1, sure) - held)
    if waited_s >= PATIENCE_S and gain >= LEAST_GAIN:
        part = min(1.0, share * 2.0 ** min(MOST_DOUBLINGS, floor(waited_s / PATIENCE_S) - 1))
        return min(under_way.pending, ceil(under_way.pending * part))
    if held == sure and owed > sure and waited_s >= rest_s(owed):
        return min(under_way.pending, 1)
    return 0


def denied_for_s(under_way: UnderWay, held: int, share: float, waited_s: float) -> float:
    """The seconds until a worker that was first denied `waited_s` ago may ask again."""
    owed = (under_way.pending + under_way.running) * share
    if held == floor(owed + NOISE) < owed and waited_s < rest_s(owed):
        return rest_s(owed) - waited_s
    return PATIENCE_S * (floor(waited_s / PATIENCE_S) + 1) - waited_s


def rest_s(owed: float) -> float:
    """How many seconds a worker waits before it rounds up the number of groups that it is `owed`."""
    return REST_S * (1 - (owed - floor(owed)))
