"""A control: `rollq` with a trainer that gets shuffled rewards, and so must not learn.

python -m benchmarks.control demo
"""

import sys
from collections.abc import Sequence

import numpy as np

from rollq.cli.main import main
from rollq.cli.up.supervisor import Role, Supervisor


def shuffle_rewards() -> None:
    """Have consumers of this process permute the rewards of each batch's valid samples."""
    from rollq.consumer.batches.batch import Batch
    from rollq.consumer.consumer import Consumer
    from rollq.consumer.trainer import taking

    take = Consumer.__next__

    def shuffled(consumer: Consumer) -> Batch:
        batch = take(consumer)
        rewards = batch.rewards.copy()
        rewards[batch.valid] = np.random.default_rng(batch.step).permutation(rewards[batch.valid])
        return batch.with_rewards(rewards)

    setattr(Consumer, "__next__", shuffled)  # noqa: B010 - for mypy
    setattr(taking, "may_stream", lambda settings: False)  # noqa: B010 - parts would not be shuffled


def start_this_trainer() -> None:
    """Have the demo of this process start its trainer from this module."""
    start = Supervisor.start

    def started(supervisor: Supervisor, name: str, command: Sequence[str], **options: bool) -> Role:
        words = [__spec__.name if name == "trainer" and word == "rollq.cli.main" else word for word in command]
        return start(supervisor, name, tuple(words), **options)

    setattr(Supervisor, "start", started)  # noqa: B010 - for mypy


if __name__ == "__main__":
    if sys.argv[1] == "train":
        shuffle_rewards()
    else:
        start_this_trainer()
    main()
