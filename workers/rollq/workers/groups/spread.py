"""Which samples a worker leaves to others of its fleet that have less to do. Pure.

A worker gives samples up when nothing waits for a worker, and it has more than its part of what all have to generate: a
group that is larger than its places, fewer groups than workers, or the last long answers on the slowest machine. Those
that wait for a place are always better off elsewhere. One that runs must be told apart: elsewhere its tokens are
computed once more, so it is given up only where each token would be much faster.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rollq.buffer.steering import Fleet
from rollq.workers.engines.speed import EngineSpeed

LEAST_RATIO = 1.5
"""How much faster a running sample must be elsewhere."""
AGAIN_S = 10.0
"""How long a sample that no worker wanted is not offered again."""


class Spare(NamedTuple):
    """A running sample that may be given up: its group, by place in a list, its index in it, and its tokens so far."""

    group: int
    sample: int
    tokens: int


def surplus(fleet: Fleet, share: float, open_samples: int, places: int) -> int:
    """How many of its `open_samples` a worker with these places has beyond its part, `share`, of what all workers have to
    generate; not more than the others have places for."""
    if fleet.workers < 2 or not share:
        return 0
    others = max(0, fleet.open - open_samples)
    free = fleet.measured_places + fleet.new_places - places - others
    return max(0, min(open_samples - ceil(share * (open_samples + others)), free))


def borrowed_share(fleet: Fleet, share: float) -> float:
    """The part of what one worker offers that is for another with this share of all work."""
    return min(1.0, share * fleet.workers / (fleet.workers - 1)) if fleet.workers > 1 else 0.0


def ratio_elsewhere(fleet: Fleet, own: EngineSpeed, own_tokens_per_s: float, open_samples: int) -> float:
    """How many times as fast a sample would be on the other workers, if all had as many: 0.0 while that is not known.

    `own_tokens_per_s`: the speed of this worker that the fleet counts, with the load of a mean worker.
    """
    others = fleet.tokens_per_s - own_tokens_per_s
    here = own.tokens_per_s(open_samples)
    there_after = max(1.0, fleet.open / fleet.workers) if fleet.workers else 1.0
    relieved = own.tokens_per_s(there_after)
    if fleet.workers < 2 or not own_tokens_per_s or others <= 0 or not here or not relieved:
        return 0.0
    machines = others / (fleet.workers - 1) / own_tokens_per_s
    return machines * (relieved / there_after) / (here / open_samples)


def chosen(spare: Sequence[Spare], most: int) -> Sequence[Spare]:
    """Up to `most` of them: those with the fewest tokens, which have the longest way to go and cost the least."""
    return sorted(spare, key=lambda one: (one.tokens, one.group, one.sample))[: max(0, most)]
