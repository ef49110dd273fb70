"""Turns of Qwen3-Coder and later models of Qwen."""

from collections.abc import Mapping

from rollq.workers.agents.tool_calls import ToolCall
from support.exchanges.common import MALFORMED, NOW, PARIS, ROME, Exchange, weather
from support.exchanges.hermes import HERMES_PARIS

XML_ROME = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
XML_PARIS = XML_ROME.replace("Rome\n</parameter>", "Paris\n</parameter>\n<parameter=days>\n2\n</parameter>")
QWEN3_XML: Mapping[str, Exchange] = {
    "an answer": Exchange("It is sunny.", content="It is sunny."),
    "a call": Exchange(XML_PARIS, (PARIS,)),
    "calls with a remark": Exchange(f"I will look.\n\n{XML_PARIS}\n{XML_ROME}", (PARIS, ROME), "I will look."),
    "thoughts that the prompt opened": Exchange(
        f"Which city?\n</think>\n\n{XML_PARIS}", (PARIS,), reasoning="Which city?\n", prompt="...<think>\n"
    ),
    "opened thoughts that were cut off": Exchange(
        f"I could {XML_PARIS}", reasoning=f"I could {XML_PARIS}", prompt="<think>\n"
    ),
    "values of all types": Exchange(
        "<tool_call>\n<function=search>\n<parameter=query>\n42\n</parameter>\n<parameter=tags>\n"
        '["a", "b"]\n</parameter>\n<parameter=filters>\n{"year": 2024}\n</parameter>\n<parameter=exact>\n'
        "true\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=score>\n0.5\n</parameter>\n"
        "</function>\n</tool_call>",
        (
            ToolCall(
                "search",
                {
                    "query": "42",
                    "tags": ["a", "b"],
                    "filters": {"year": 2024},
                    "exact": True,
                    "limit": None,
                    "score": 0.5,
                },
            ),
        ),
    ),
    "a value of several lines": Exchange(
        XML_ROME.replace("Rome", "\n  Rome\n</city>\n"), (weather(city="\n  Rome\n</city>\n"),)
    ),
    "values without line breaks": Exchange(
        "<tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>", (ROME,)
    ),
    "no parameters": Exchange("<tool_call>\n<function=now>\n</function>\n</tool_call>", (NOW,)),
    "no opening mark": Exchange(XML_ROME.removeprefix("<tool_call>\n"), (ROME,)),
    "no closing mark": Exchange(XML_ROME.removesuffix("\n</tool_call>"), (ROME,)),
    "a function that was cut off": Exchange(XML_PARIS.partition("</function>")[0], (MALFORMED,)),
    "a parameter that was cut off": Exchange(XML_PARIS.partition("2\n")[0], (MALFORMED,)),
    "a call that was cut off before its name": Exchange("So: <tool_call>\n<func", (MALFORMED,), "So:"),
    "a parameter that is not closed": Exchange(
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</function>\n</tool_call>", (MALFORMED,)
    ),
    "a call in JSON": Exchange(HERMES_PARIS, (MALFORMED,)),
    "a function without a name": Exchange("<tool_call>\n<function=>\n</function>\n</tool_call>", (MALFORMED,)),
}
