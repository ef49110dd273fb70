"""The draws of groups, in the simplest terms: see `lua/common/orders.lua`."""

import math
from collections.abc import Sequence
from hashlib import sha1

LEVELS_PER_DOUBLING = 8


def level_of(priority: float) -> int:
    """The level of a priority within 2**-32 to 2**32."""
    return math.floor(math.log2(priority) * LEVELS_PER_DOUBLING + 0.5)


def draw(
    groups: Sequence[tuple[int, int]], count: int, *, seed: int, task: str, step: int
) -> tuple[list[int], list[float]]:
    """The ids of `count` groups that are drawn from pairs of level and id, which are sorted; and their probabilities.

    Neighbours of one level have places. A place that was drawn has what stood at the last place.
    """
    levels = list(dict.fromkeys(level for level, _ in groups))
    places = {level: [group_id for other, group_id in groups if other == level] for level in levels}
    weights = {level: 2 ** (level / LEVELS_PER_DOUBLING) for level in levels}
    total = sum(len(places[level]) * weights[level] for level in levels)
    ids, probabilities = list[int](), list[float]()
    for number in range(1, min(count, len(groups)) + 1):
        digest = sha1(f"{seed}:{task}:{step}:{number}".encode(), usedforsecurity=False).hexdigest()
        rest = int(digest[:12], 16) / 16**12 * sum(len(places[level]) * weights[level] for level in levels)
        for level in levels:
            if places[level]:
                chosen = level
                rest -= len(places[level]) * weights[level]
                if rest < 0:
                    break
        left = places[chosen]
        place = int(int(digest[12:24], 16) / 16**12 * len(left))
        ids.append(left[place])
        probabilities.append(weights[chosen] / total)
        last = left.pop()
        if place < len(left):
            left[place] = last
    return ids, probabilities
