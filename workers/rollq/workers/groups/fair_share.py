"""The number of groups under way that a worker may hold, beside the other workers of its fleet. Pure.

Groups are shared in proportion to what each worker can do, so all workers end at about the same time. A lease does not
change the number of groups under way, so workers that ask at the same moment agree on it.

Shares that are not whole numbers leave a rest. Workers take it one by one, the worker with the largest fraction first.
After a while, workers that more samples make faster take the remaining groups beyond their shares, so outdated facts
about the fleet, and workers without places for their shares, leave groups idle only for that while. A fully used worker
leaves them to the next worker with a place: it would only keep them.
"""

from math import ceil, floor

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies.tasks import UnderWay

NOISE = 0.1
"""A share is taken for the next whole number of groups when it is this near."""
ALIKE = 0.08
"""Workers whose measured speeds differ by less than this count as equally fast."""
REST_S = 0.1
"""Within this time the rest is taken: the larger the fraction of a group that a worker is owed, the sooner it asks."""
MOST_DOUBLINGS = 30
PATIENCE_S = 1.0
"""Groups that have waited this long are for every worker. After each further such time, it may take twice as many."""
LEAST_GAIN = 0.5
"""Only workers with at least this gain from more samples take these groups; see `EngineSpeed.gain`."""


def counted_speed(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The speed at which a worker with these places counts: the fleet's speed per place, if its speed is near that."""
    if not fleet.tokens_per_s:
        return tokens_per_s
    usual = places * fleet.tokens_per_s / fleet.measured_places
    return usual if abs(tokens_per_s - usual) < ALIKE * usual else tokens_per_s


def share_of(fleet: Fleet, places: int, tokens_per_s: float) -> float:
    """The part of all work that is for a worker with these places and this speed (0: not known), from 0 to 1.

    A worker of unknown speed counts with the other workers' speed per place.
    """
    pace = fleet.tokens_per_s / fleet.measured_places if fleet.tokens_per_s else 1.0
    own_speed = tokens_per_s or places * pace
    everyone = fleet.tokens_per_s + fleet.new_places * pace
    return min(1.0, own_speed / everyone) if everyone else 1.0


def allowance(under_way: UnderWay, held: int, share: float, waited_s: float, gain: float = 1.0) -> int:
    """How many groups a worker that holds `held` may take now, at most the pending ones. A worker that holds none may
    take one.

    `waited_s`: for how long it has been denied pending groups. `gain`: see `EngineSpeed.gain`.
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
    """How long a worker waits to round the number of groups that it is `owed` up to a whole number."""
    return REST_S * (1 - (owed - floor(owed)))
