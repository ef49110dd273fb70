"""Seeds for samples and turns. They are the same on every worker, so a repeated sample gets the same seeds."""

from hashlib import blake2b


def sample_seed(run_seed: int, task: str, group_id: int, index: int, attempt: int) -> int:
    """The 63-bit seed of one sample in one attempt, the same on every worker."""
    name = f"{run_seed}/{task}/{group_id}/{index}/{attempt}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1


def turn_seed(seed: int, turn: int) -> int:
    """The 63-bit seed of one of a sample's turns."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()) >> 1
