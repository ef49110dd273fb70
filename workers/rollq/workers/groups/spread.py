"""Chooses the samples that a worker gives to workers with less work in its fleet. Pure.

Groups are shared as a whole. A fully used worker with few groups gives up the samples beyond its part before it starts
them. Later, if no group is pending, a worker gives up samples without a place, which always run sooner elsewhere.
Moving a running sample costs reading its prompt and tokens a second time, so a running sample moves only if each token
would be much faster elsewhere: at the end of a batch, on a slow machine.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies.tasks import UnderWay
from rollq.workers.engines.speed import EngineSpeed

LEAST_PART = 0.2
"""The smallest fraction of its samples that a worker gives up before it starts them: giving up fewer makes nothing
faster."""
MOST_GAIN = 0.5
"""A worker with a larger gain keeps its samples; see `EngineSpeed.gain`."""
LEAST_SAMPLE_S = 1.0
"""Shorter samples would end before another worker received them."""
LEAST_RATIO = 1.5
"""How many times as fast a running sample must be elsewhere."""
FEW_GROUPS = 10
"""With more groups, the samples beyond a worker's part are only a small fraction of its samples."""
MOST_KEPT_TOKENS = 250_000
"""Running samples stay if their group has more tokens than this in the buffer: a borrower would read all of them."""


class Spare(NamedTuple):
    """A running sample that may be given up: its group's position in a list, its index in the group, and its number of
    tokens so far."""

    group: int
    sample: int
    tokens: int


def part_of(under_way: UnderWay, share: float, group_size: int) -> int:
    """The number of samples for a worker with this share, among the groups under way, each of this size."""
    return ceil(share * (under_way.pending + under_way.running) * group_size)


def may_pay(gain: float, sample_s: float) -> bool:
    """Whether samples may end sooner elsewhere, even though this worker has places for them.

    `gain` comes from `EngineSpeed.gain`. `sample_s` is the mean time of a sample, in seconds; 0.0 while unknown.
    """
    return gain <= MOST_GAIN and sample_s >= LEAST_SAMPLE_S


def beforehand(open_samples: int, part: int) -> int:
    """The number of its `open_samples` that a worker gives up before it starts them."""
    spare = open_samples - part
    return spare if spare >= LEAST_PART * open_samples else 0


def surplus(fleet: Fleet, share: float, open_samples: int, places: int) -> int:
    """The number of its `open_samples` that a worker with these places has beyond its `share` of all samples to
    generate, up to the other workers' number of places.
    """
    if fleet.workers < 2 or not share:
        return 0
    others = max(0, fleet.open - open_samples)
    free = fleet.measured_places + fleet.new_places - places - others
    return max(0, min(open_samples - ceil(share * (open_samples + others)), free))


def borrowed_share(fleet: Fleet, share: float) -> float:
    """The fraction of a worker's offered samples that another worker, with this share of all work, may borrow."""
    return min(1.0, share * fleet.workers / (fleet.workers - 1)) if fleet.workers > 1 else 0.0


def ratio_elsewhere(fleet: Fleet, own: EngineSpeed, own_tokens_per_s: float, open_samples: int) -> float:
    """How many times as fast a sample would run on the other workers if all workers had equally many samples; 0.0 while
    unknown.

    `own_tokens_per_s` is the speed that the fleet counts for this worker, at the mean load.
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
    """Up to `most` spare samples with the fewest tokens: they have the most work left and cost the least to move."""
    return sorted(spare, key=lambda entry: (entry.tokens, entry.group, entry.sample))[: max(0, most)]
