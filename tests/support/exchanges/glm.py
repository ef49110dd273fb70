"""Turns of GLM-4.5 and later."""

from collections.abc import Mapping

from rollq.workers.agents.tool_calls import ToolCall
from support.exchanges.common import MALFORMED, NOW, PARIS, ROME, Exchange, weather

GLM_ROME = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
GLM_PARIS = GLM_ROME.replace("Rome</arg_value>", "Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>")
GLM: Mapping[str, Exchange] = {
    "an answer": Exchange("\nIt is sunny.", content="\nIt is sunny."),
    "a call": Exchange(GLM_PARIS, (PARIS,)),
    "a call without line breaks": Exchange(GLM_PARIS.replace("\n", ""), (PARIS,)),
    "calls with a remark": Exchange(f"I will look.\n{GLM_PARIS}\n{GLM_ROME}", (PARIS, ROME), "I will look."),
    "thoughts and a call": Exchange(f"\n<think>Which?</think>\n{GLM_PARIS}", (PARIS,), reasoning="Which?"),
    "thoughts that the prompt opened": Exchange(
        f"Which?</think>{GLM_PARIS}", (PARIS,), reasoning="Which?", prompt="<|assistant|><think>"
    ),
    "opened thoughts that were cut off": Exchange(
        f"I could {GLM_PARIS}", reasoning=f"I could {GLM_PARIS}", prompt="<|assistant|><think>"
    ),
    "a number for a string": Exchange(
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>75001</arg_value>\n</tool_call>",
        (weather(city="75001"),),
    ),
    "an unknown tool": Exchange(
        "<tool_call>x\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>b</arg_key>\n<arg_value>seven"
        "</arg_value>\n</tool_call>",
        (ToolCall("x", {"a": 7, "b": "seven"}),),
    ),
    "no arguments": Exchange("<tool_call>now\n</tool_call>", (NOW,)),
    "a call that was cut off": Exchange(GLM_PARIS[:-5], (MALFORMED,)),
    "an argument without a value": Exchange("<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>", (MALFORMED,)),
    "a key that is not closed": Exchange(
        "<tool_call>weather\n<arg_key>city\n<arg_value>Rome</arg_value>\n</tool_call>", (MALFORMED,)
    ),
    "text after an argument": Exchange(GLM_ROME.replace("\n</tool", "\nquickly\n</tool"), (MALFORMED,)),
    "no name": Exchange("<tool_call>\n</tool_call>", (MALFORMED,)),
}
