"""A custom trainer that learns nothing."""

import time
from pathlib import Path

from rollq.consumer import Consumer, ConsumerSettings

STEP_S = 0.2


def train(url: str, run: str, model: Path, steps: int, step_s: float = STEP_S) -> None:
    """Train so many steps of `step_s` seconds: publish the weights of the folder `model` again and again."""
    settings = ConsumerSettings(transport="redis")
    with Consumer.connect(url, run=run, weights=model, settings=settings) as consumer:
        for batch in consumer:
            time.sleep(step_s)
            consumer.publish(model, step=batch.step)
            consumer.commit(batch)
            consumer.checkpoint(batch.step)
            if batch.step == steps:
                break
