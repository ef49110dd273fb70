"""How many of the groups that are under way a worker may hold, beside the others of its fleet. Pure.

Groups are shared in proportion to what each worker can do, so that all end at about the same time. What is under way
is the same number before and after a lease, so workers that ask at the same moment agree on it.

A share that is not a whole number leaves a rest. Workers take it one by one, the one with the largest fraction first.
Groups that nobody has taken after a while are taken beyond the shares by workers that more samples make faster: no fact
about the fleet that is out of date, and no worker without a place for its share, leaves these idle for longer. A worker
that is fully used leaves them to the next that has a place: it would only keep them.
"""

from math import ceil, floor

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies import UnderWay

NOISE = 0.1
"""A share is taken for the next whole number of groups when it is this near."""
ALIKE = 0.08
"""Workers whose measured speeds differ by less than this count as equally fast."""
REST_S = 0.1
"""Within this time the rest is taken: first by a worker that is nearly owed another group, last by one that is not."""
MOST_DOUBLINGS = 30
PATIENCE_S = 1.0
"""Groups that have waited this long are for everybody: after each further time, a worker may take twice as many."""
LEAST_GAIN = 0.5
"""They are not for workers of which more samples make less; see `EngineSpeed.gain`."""


def counted_speed(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The speed that a worker with these places counts with: that of the fleet, place by place, if it is alike."""
    if not fleet.tokens_per_s:
        return tokens_per_s
    usual = places * fleet.tokens_per_s / fleet.measured_places
    return usual if abs(tokens_per_s - usual) < ALIKE * usual else tokens_per_s


def share_of(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The part of all work that is for a worker with these places and this speed (0: not known), from 0 to 1.

    A worker whose speed is not known counts as fast as the others are, place by place.
    """
    pace = fleet.tokens_per_s / fleet.measured_places if fleet.tokens_per_s else 1.0
    own_speed = tokens_per_s or places * pace
    everyone = fleet.tokens_per_s + fleet.new_places * pace
    return min(1.0, own_speed / everyone) if everyone else 1.0


def allowance(under_way: UnderWay, held: int, share: float, waited_s: float, gain: float = 1.0) -> int:
    """How many groups a worker that holds `held` may take now; not more than are pending. One that holds none may
    take one.

    `waited_s`: for how long groups have been pending that it was not allowed. `gain`: see `EngineSpeed.gain`.
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
    """How soon a worker that was denied, `waited_s` after it was first denied, may ask again."""
    owed = (under_way.pending + under_way.running) * share
    if held == floor(owed + NOISE) < owed and waited_s < rest_s(owed):
        return rest_s(owed) - waited_s
    return PATIENCE_S * (floor(waited_s / PATIENCE_S) + 1) - waited_s


def rest_s(owed: float) -> float:
    """How long a worker that is owed this many groups waits before it takes one more than a whole number of them."""
    return REST_S * (1 - (owed - floor(owed)))
