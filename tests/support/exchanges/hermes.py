"""Turns of Hermes, Qwen2.5 and Qwen3."""

from collections.abc import Mapping

from rollq.workers.agents.tool_calls import ToolCall
from support.exchanges.common import MALFORMED, NOW, PARIS, ROME, Exchange

HERMES_PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
HERMES_ROME = HERMES_PARIS.replace('Paris", "days": 2', 'Rome"')
HERMES: Mapping[str, Exchange] = {
    "an answer": Exchange("It is sunny.\n", content="It is sunny.\n"),
    "a call": Exchange(HERMES_PARIS, (PARIS,)),
    "calls with a remark": Exchange(f"I will look.\n{HERMES_PARIS}\n{HERMES_ROME}", (PARIS, ROME), "I will look."),
    "thoughts and a call": Exchange(
        f"<think>\nWhich city?\n</think>\n\n{HERMES_PARIS}", (PARIS,), reasoning="\nWhich city?\n"
    ),
    "thoughts that the prompt opened": Exchange(
        f"Which city?\n</think>\n\n{HERMES_PARIS}", (PARIS,), reasoning="Which city?\n", prompt="...<think>\n"
    ),
    "thoughts that nothing opened": Exchange("Which?\n</think>\n\nRome.", (), "\n\nRome.", "Which?\n"),
    "thoughts that are turned off": Exchange(
        HERMES_PARIS, (PARIS,), prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "empty thoughts": Exchange("<think>\n\n</think>\n\nHello", (), "\n\nHello", "\n\n"),
    "thoughts that were cut off": Exchange(f"<think>\nI could {HERMES_PARIS}", reasoning=f"\nI could {HERMES_PARIS}"),
    "opened thoughts that were cut off": Exchange(
        f"I could {HERMES_PARIS}", reasoning=f"I could {HERMES_PARIS}", prompt="<think>\n"
    ),
    "a call within thoughts": Exchange(
        f"<think>{HERMES_ROME}? No.</think>{HERMES_PARIS}", (PARIS,), reasoning=f"{HERMES_ROME}? No."
    ),
    "a mark of thoughts in an argument": Exchange(
        '<tool_call>{"name": "search", "arguments": {"query": "</think>"}}</tool_call>',
        (ToolCall("search", {"query": "</think>"}),),
    ),
    "a call without arguments": Exchange('<tool_call>{"name": "now"}</tool_call>', (NOW,)),
    "arguments before the name": Exchange(
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>', (ROME,)
    ),
    "an unknown tool": Exchange('<tool_call>{"name": "x", "arguments": {}}</tool_call>', (ToolCall("x", {}),)),
    "a call that was cut off": Exchange(f"{HERMES_PARIS}\n{HERMES_ROME[:-3]}", (PARIS, MALFORMED)),
    "no JSON": Exchange("<tool_call>\nweather(Paris)\n</tool_call>", (MALFORMED,)),
    "JSON that is no object": Exchange("<tool_call>[1]</tool_call>", (MALFORMED,)),
    "arguments that are no object": Exchange(
        '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>', (MALFORMED,)
    ),
}
