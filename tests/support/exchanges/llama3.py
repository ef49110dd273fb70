"""Turns of Llama 3."""

from collections.abc import Mapping

from rollq.workers.agents.tool_calls import ToolCall
from support.exchanges.common import MALFORMED, PARIS, ROME, Exchange, weather

LLAMA_PARIS = '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}'
LLAMA_ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
LLAMA3: Mapping[str, Exchange] = {
    "an answer": Exchange("It is sunny.", content="It is sunny."),
    "a call": Exchange(LLAMA_PARIS, (PARIS,)),
    "calls": Exchange(f"{LLAMA_PARIS}; {LLAMA_ROME}", (PARIS, ROME)),
    "a call after the tag": Exchange(f"<|python_tag|>{LLAMA_PARIS}", (PARIS,)),
    "calls after the tag": Exchange(f"<|python_tag|>{LLAMA_PARIS}; {LLAMA_ROME}", (PARIS, ROME)),
    "arguments for parameters": Exchange(LLAMA_PARIS.replace("parameters", "arguments"), (PARIS,)),
    "a type first": Exchange(LLAMA_PARIS.replace('{"name"', '{"type": "function", "name"'), (PARIS,)),
    "text around a call": Exchange(f"I will look: {LLAMA_PARIS} Shall I?", (PARIS,), "I will look:\nShall I?"),
    "braces in a string": Exchange(LLAMA_ROME.replace("Rome", 'a } \\"{\\" b'), (weather(city='a } "{" b'),)),
    "a tool that Llama knows": Exchange(
        '<|python_tag|>brave_search.call(query="Rome, Paris")', (ToolCall("brave_search", {"query": "Rome, Paris"}),)
    ),
    "code": Exchange("<|python_tag|>print(6 * 7)", (MALFORMED,)),
    "JSON that is no call": Exchange('{"type": "city", "city": "Rome"}', content='{"type": "city", "city": "Rome"}'),
    "a call that was cut off": Exchange(LLAMA_PARIS[:-2], (MALFORMED,)),
    "a call in text that was cut off": Exchange(f"So {LLAMA_PARIS[:-2]}", content=f"So {LLAMA_PARIS[:-2]}"),
    "invalid JSON": Exchange('{"name": "weather", "parameters": {city}}', (MALFORMED,)),
    "parameters that are no object": Exchange('{"name": "weather", "parameters": "Paris"}', (MALFORMED,)),
}
