"""The scores of sorted sets that are ordered by version, then by arrival: version * `ARRIVALS` + arrival.

Scores stay below 2^53, up to which doubles hold whole numbers exactly: 20 bits for the version, 32 for the arrival, and
1 for evaluation in the set of pending groups.
"""

from typing import Final

ARRIVALS: Final = 2**32
"""More arrivals than a task ever has."""
NO_TOKENS: Final = 2**20 - 1
"""The oldest version of a group without tokens from the run's weights: such a group is never stale."""
