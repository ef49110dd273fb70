"""Groups to batches: what a trainer imports.

`Consumer` takes each step's batch from the replay buffer, hands weights to the workers and keeps the trainer's place;
`Batch` turns groups into micro-batches; `rollq.consumer.grpo` has the loss, `rollq.consumer.trainer` the reference
trainer. This package imports without torch; `Batch.micro_batches` and what needs gradients import it.
"""

from rollq.buffer.advantages import AdvantageSettings
from rollq.consumer.batch import Batch, BatchCounts, TokenSequence
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings

__all__ = ["AdvantageSettings", "Batch", "BatchCounts", "Consumer", "ConsumerSettings", "TokenSequence"]
