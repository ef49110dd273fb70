"""One rank of a trainer: `python -m benchmarks.rank URL RUN RANK RANKS`.

Prints a line when it has its place, and then a line for each line of its standard input: `share` takes the batch of
step 1 and makes the tensors of its share; `whole` also reads the whole batch, as every rank would have to without rows.
"""

import sys

import torch

from rollq.consumer import Consumer, ConsumerSettings

MICRO_BATCH_TOKENS = 1 << 20


def main(url: str, run: str, rank: int, ranks: int) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    settings = ConsumerSettings(rank=rank, world_size=ranks, launch_id="bench", prefetch_bytes=0, takeover=True)
    with Consumer.connect(url, run=run, weights={"weight": torch.zeros(1)}, settings=settings) as consumer:
        print("ready", flush=True)
        for line in sys.stdin:
            batch = next(consumer)
            if line.strip() == "whole":
                list(batch.sequences)
            print(sum(micro.input_ids.numel() for micro in batch.micro_batches(MICRO_BATCH_TOKENS)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
