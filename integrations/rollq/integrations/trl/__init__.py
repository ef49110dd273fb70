"""TRL's GRPO trainer on rollq's batches: `pip install 'rollq[trl]'`.

`connect` opens a training run's `Consumer`, from the newest checkpoint; `RollqGRPOTrainer` trains with this consumer.
TRL computes the loss, updates the weights and saves checkpoints. rollq decides which batches are trained, and records
when they are.
"""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = ["RollqGRPOTrainer", "connect"]

if TYPE_CHECKING:
    from rollq.integrations.trl.connecting import connect
    from rollq.integrations.trl.trainer import RollqGRPOTrainer
else:
    __getattr__, __dir__ = lazy_exports(
        __name__, {"rollq.integrations.trl.connecting": "connect", "rollq.integrations.trl.trainer": "RollqGRPOTrainer"}
    )
