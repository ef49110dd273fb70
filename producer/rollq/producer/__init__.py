"""Turns prompts into groups to generate: which prompt comes next, how many groups are scheduled, and when."""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = [
    "BatchCoordinator",
    "BatchHandle",
    "BatchResult",
    "Operator",
    "OverRollout",
    "PromptOrder",
    "ScoredGroup",
    "TaskState",
    "clip_rewards",
    "drop_zero_advantage",
    "give_advantages",
    "group_normalised",
    "leave_one_out",
    "reinforce_plus_plus",
]

if TYPE_CHECKING:
    from rollq.producer.batches import BatchHandle, BatchResult, OverRollout
    from rollq.producer.coordinator import BatchCoordinator
    from rollq.producer.pipeline import (
        Operator,
        ScoredGroup,
        clip_rewards,
        drop_zero_advantage,
        give_advantages,
        group_normalised,
        leave_one_out,
        reinforce_plus_plus,
    )
    from rollq.producer.prompt_order import PromptOrder
    from rollq.producer.strategy import TaskState
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.producer.batches": "BatchHandle BatchResult OverRollout",
            "rollq.producer.coordinator": "BatchCoordinator",
            "rollq.producer.pipeline": (
                "Operator ScoredGroup clip_rewards drop_zero_advantage "
                "give_advantages group_normalised leave_one_out reinforce_plus_plus"
            ),
            "rollq.producer.prompt_order": "PromptOrder",
            "rollq.producer.strategy": "TaskState",
        },
    )
