"""Tickets to scored groups: an asyncio RQ worker with an engine, agent loops, judges, and live weights.

Read in this order: `run` wires a worker together; `groups` leases groups, runs them and puts the results; `agents`
generates samples, `judging` scores them, and `weight_follower` keeps the engine's weights current; `engines` does the
inference, over `http` if the engine is a server. `rq` is the only part of a worker that RQ sees.
"""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = [
    "AgentLoop",
    "CallError",
    "Completion",
    "Conversation",
    "Credit",
    "Engine",
    "EngineDead",
    "Environment",
    "FailureKind",
    "Malformed",
    "ModelPool",
    "Opening",
    "Request",
    "Rollout",
    "SampleFailed",
    "Sampling",
    "Scorer",
    "Step",
    "SwapMode",
    "Tokenizer",
    "ToolCall",
    "Turn",
    "WeightsVersion",
    "finish",
    "match_math",
    "next_request",
    "parse_reason",
    "prompt_messages",
    "tokens_left",
]

if TYPE_CHECKING:
    from rollq.buffer.values.failures import FailureKind, SampleFailed
    from rollq.workers.agents.conversation import Conversation
    from rollq.workers.agents.environments import Environment, Opening, Step
    from rollq.workers.agents.loops import AgentLoop, Rollout, finish
    from rollq.workers.agents.multi_turn import next_request, prompt_messages, tokens_left
    from rollq.workers.agents.tool_calls import CallError, Malformed, ToolCall
    from rollq.workers.agents.turns import Turn
    from rollq.workers.engines.protocol import (
        Completion,
        Engine,
        EngineDead,
        Request,
        Sampling,
        Scorer,
        SwapMode,
        Tokenizer,
        WeightsVersion,
        parse_reason,
    )
    from rollq.workers.http.pools import ModelPool
    from rollq.workers.judging.matching import match_math
    from rollq.workers.judging.rewards import Credit
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.buffer.values.failures": "FailureKind SampleFailed",
            "rollq.workers.agents.conversation": "Conversation",
            "rollq.workers.agents.environments": "Environment Opening Step",
            "rollq.workers.agents.loops": "AgentLoop Rollout finish",
            "rollq.workers.agents.multi_turn": "next_request prompt_messages tokens_left",
            "rollq.workers.agents.tool_calls": "CallError Malformed ToolCall",
            "rollq.workers.agents.turns": "Turn",
            "rollq.workers.engines.protocol": (
                "Completion Engine EngineDead Request Sampling Scorer SwapMode Tokenizer WeightsVersion parse_reason"
            ),
            "rollq.workers.http.pools": "ModelPool",
            "rollq.workers.judging.matching": "match_math",
            "rollq.workers.judging.rewards": "Credit",
        },
    )
