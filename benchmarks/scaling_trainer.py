"""`python -m benchmarks.scaling_trainer URL RUN MODEL STEPS TRAIN_S`: a trainer that waits instead of training.

It prints a line of JSON for each step: the time of the commit, the ids of its groups, and the lengths of all answers.
"""

import sys
import time
from pathlib import Path

import orjson

from benchmarks.scaled_run import PROMPT_TOKENS
from rollq.consumer import Consumer


def main(url: str, run: str, model: str, steps: str, train_s: str) -> None:
    """Train `steps` steps of `train_s` seconds each."""
    with Consumer.connect(url, run=run, weights=Path(model)) as consumer:
        for batch in consumer:
            lengths = [int(length) - PROMPT_TOKENS for length in batch.lengths]
            time.sleep(float(train_s))
            consumer.publish(Path(model), step=batch.step)
            consumer.commit(batch)
            line = {
                "at_s": time.monotonic(),
                "groups": [group_id for _, group_id in batch.group_ids],
                "lengths": lengths,
            }
            sys.stdout.buffer.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            sys.stdout.flush()
            if batch.step >= int(steps):
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
