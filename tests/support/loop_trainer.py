"""A custom trainer that learns nothing, in a process: `python -m support.loop_trainer URL RUN MODEL STEPS`."""

import sys
import time
from pathlib import Path

from rollq.consumer import Consumer, ConsumerSettings

STEP_S = 0.2


def main() -> None:
    """Train STEPS steps: publish the weights of the folder MODEL again and again."""
    url, run, model, steps = sys.argv[1:]
    settings = ConsumerSettings(transport="redis")
    with Consumer.connect(url, run=run, weights=Path(model), settings=settings) as consumer:
        for batch in consumer:
            time.sleep(STEP_S)
            consumer.publish(Path(model), step=batch.step)
            consumer.commit(batch)
            consumer.checkpoint(batch.step)
            if batch.step == int(steps):
                break


if __name__ == "__main__":
    main()
