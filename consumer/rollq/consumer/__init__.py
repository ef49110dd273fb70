"""The trainer's side of a run: batches from groups, weights for workers.

`Consumer` takes each step's batch from the replay buffer, publishes weights to the workers, and records the trainer's
progress; `Batch` turns groups into micro-batches; `policy_loss` computes their loss; `rollq.consumer.trainer.trainer`
is the reference trainer. Names are imported on use, so torch is imported only for gradients.
"""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = [
    "AdvantageSettings",
    "Archive",
    "Batch",
    "BatchCounts",
    "BatchStream",
    "Connection",
    "Consumer",
    "ConsumerSettings",
    "ImageInputs",
    "ImageProcessor",
    "LossSettings",
    "MicroBatch",
    "OtherLogprobs",
    "PayloadSettings",
    "RecordedRun",
    "TokenSequence",
    "leave_out_absent",
    "policy_loss",
    "probe_of",
    "replay_experts",
    "sum_gradients",
    "teacher_logprobs",
    "teacher_top_logprobs",
    "to_checkpoint_format",
    "token_advantages",
]

if TYPE_CHECKING:
    from rollq.buffer.archive.reader import Archive
    from rollq.buffer.images.processor import ImageProcessor
    from rollq.buffer.rewards.advantages import AdvantageSettings
    from rollq.buffer.rewards.credit import token_advantages
    from rollq.buffer.rules.settings import PayloadSettings
    from rollq.consumer.batches.batch import Batch
    from rollq.consumer.batches.image_inputs import ImageInputs
    from rollq.consumer.batches.micro_batch import MicroBatch
    from rollq.consumer.batches.sequences import BatchCounts, TokenSequence
    from rollq.consumer.claims.connection import Connection
    from rollq.consumer.claims.stream import BatchStream
    from rollq.consumer.consumer import Consumer
    from rollq.consumer.losses.settings import LossSettings
    from rollq.consumer.objective.policy_loss import OtherLogprobs, leave_out_absent, policy_loss, sum_gradients
    from rollq.consumer.objective.teacher import teacher_logprobs, teacher_top_logprobs
    from rollq.consumer.settings import ConsumerSettings
    from rollq.consumer.trainer.expert_replay import replay_experts
    from rollq.consumer.trainer.recorded_run import RecordedRun
    from rollq.consumer.weights.checkpoint_format import to_checkpoint_format
    from rollq.consumer.weights.sources import probe_of
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.buffer.rewards.advantages": "AdvantageSettings",
            "rollq.buffer.archive.reader": "Archive",
            "rollq.buffer.rewards.credit": "token_advantages",
            "rollq.buffer.rules.settings": "PayloadSettings",
            "rollq.buffer.images.processor": "ImageProcessor",
            "rollq.consumer.batches.batch": "Batch",
            "rollq.consumer.claims.connection": "Connection",
            "rollq.consumer.consumer": "Consumer",
            "rollq.consumer.trainer.expert_replay": "replay_experts",
            "rollq.consumer.batches.image_inputs": "ImageInputs",
            "rollq.consumer.objective.policy_loss": "OtherLogprobs leave_out_absent policy_loss sum_gradients",
            "rollq.consumer.losses.settings": "LossSettings",
            "rollq.consumer.batches.micro_batch": "MicroBatch",
            "rollq.consumer.trainer.recorded_run": "RecordedRun",
            "rollq.consumer.batches.sequences": "BatchCounts TokenSequence",
            "rollq.consumer.settings": "ConsumerSettings",
            "rollq.consumer.claims.stream": "BatchStream",
            "rollq.consumer.objective.teacher": "teacher_logprobs teacher_top_logprobs",
            "rollq.consumer.weights.checkpoint_format": "to_checkpoint_format",
            "rollq.consumer.weights.sources": "probe_of",
        },
    )
