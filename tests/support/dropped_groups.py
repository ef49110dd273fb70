"""The ways in which the groups of a batch leave the buffer with their samples."""

from support.buffer_run import World


def drop_by_checkpoint(world: World) -> None:
    """A checkpoint covers their step."""
    world.train(1)
    world.buffer.checkpoint(world.held, 1)


def drop_by_release(world: World) -> None:
    """The trainer releases their batch."""
    claimed = world.claim(1)
    world.buffer.release(world.held, 1, "drop", claim_round=claimed.claim_round)


def drop_by_new_samples(world: World) -> None:
    """A rewind has their prompts sampled again."""
    world.train(1)
    world.begin(0, mode="regenerate", launch_id="second")
