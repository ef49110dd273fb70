"""Turns of DeepSeek V3, R1 and V3.1."""

from collections.abc import Mapping

from rollq.workers.agents.tool_calls import ToolCall
from support.exchanges.common import MALFORMED, PARIS, ROME, Exchange, weather

FENCED_PARIS = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>'
)
PLAIN_PARIS = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜>'
PLAIN_ROME = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'


def deepseek(*calls: str) -> str:
    """The calls with the marks around them."""
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


DEEPSEEK_V3: Mapping[str, Exchange] = {
    "an answer": Exchange("It is sunny.", content="It is sunny."),
    "a call": Exchange(deepseek(FENCED_PARIS), (PARIS,)),
    "calls with a remark": Exchange(
        f"I will look.{deepseek(FENCED_PARIS, chr(10), FENCED_PARIS.replace('Paris', 'Rome'))}",
        (PARIS, weather(city="Rome", days=2)),
        "I will look.",
    ),
    "thoughts and a call": Exchange(
        f"<think>\nWhich?\n</think>\n\n{deepseek(FENCED_PARIS)}", (PARIS,), "\n\n", "\nWhich?\n"
    ),
    "thoughts that the prompt opened": Exchange(
        f"Which?\n</think>\n\nRome.{deepseek(FENCED_PARIS)}",
        (PARIS,),
        "\n\nRome.",
        "Which?\n",
        prompt="<｜Assistant｜><think>\n",
    ),
    "opened thoughts that were cut off": Exchange(
        deepseek(FENCED_PARIS), reasoning=deepseek(FENCED_PARIS), prompt="<｜Assistant｜><think>\n"
    ),
    "a call that was cut off": Exchange(f"<｜tool▁calls▁begin｜>{FENCED_PARIS[:-5]}", (MALFORMED,)),
    "a list of calls that was cut off": Exchange(f"<｜tool▁calls▁begin｜>{FENCED_PARIS}", (PARIS,)),
    "invalid JSON": Exchange(deepseek(FENCED_PARIS.replace("}", "")), (MALFORMED,)),
    "no fence": Exchange(deepseek(FENCED_PARIS.replace("```", "")), (MALFORMED,)),
}
DEEPSEEK_V31: Mapping[str, Exchange] = {
    "a call": Exchange(deepseek(PLAIN_PARIS), (PARIS,)),
    "calls with text around them": Exchange(
        f"I will look.{deepseek(PLAIN_PARIS, PLAIN_ROME)} So.", (PARIS, ROME), "I will look. So."
    ),
    "a prompt that closed the thoughts": Exchange(
        deepseek(PLAIN_PARIS), (PARIS,), prompt="<｜User｜>Hi<｜Assistant｜></think>"
    ),
    "a tool that is called function": Exchange(
        deepseek("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>"), (ToolCall("function", {}),)
    ),
    "no marks around a call": Exchange(
        '<｜tool▁calls▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁calls▁end｜>', (MALFORMED,)
    ),
    "a name that was cut off": Exchange("So.<｜tool▁calls▁begin｜>weath", (MALFORMED,), "So."),
    "no separator": Exchange(deepseek("<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>"), (MALFORMED,)),
    "no name": Exchange(deepseek("<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"), (MALFORMED,)),
    "an answer": Exchange("It is sunny.", content="It is sunny."),
}
