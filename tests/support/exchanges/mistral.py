"""Turns of Mistral's models."""

from collections.abc import Mapping

from support.exchanges.common import MALFORMED, NOW, PARIS, ROME, Exchange, weather

MISTRAL: Mapping[str, Exchange] = {
    "an answer": Exchange("It is sunny.", content="It is sunny."),
    "a list": Exchange('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]', (PARIS,)),
    "a list with ids": Exchange(
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 2}, "id": "bbc5b7ede"}, '
        '{"name": "weather", "arguments": {"city": "Rome"}, "id": "bbc5b7edf"}]',
        (PARIS, ROME),
    ),
    "arguments before the name": Exchange('[TOOL_CALLS] [{"arguments": {"city": "Rome"}, "name": "weather"}]', (ROME,)),
    "a name and arguments": Exchange('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', (ROME,)),
    "names and arguments": Exchange(
        'I will look.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        (PARIS, ROME),
        "I will look.",
    ),
    "an id": Exchange('[TOOL_CALLS]weather[CALL_ID]bbc5b7ede[ARGS]{"city": "Rome"}', (ROME,)),
    "no mark before the arguments": Exchange('hi{hi[TOOL_CALLS]weather{"city": "Rome"}', (ROME,), "hi{hi"),
    "a mark within an argument": Exchange(
        '[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]"}', (weather(city="[TOOL_CALLS]"),)
    ),
    "text after a call": Exchange("[TOOL_CALLS]now[ARGS]{}\nDone", (NOW,), "\nDone"),
    "thoughts and a call": Exchange(
        '[THINK]Which city?[/THINK]Well.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', (ROME,), "Well.", "Which city?"
    ),
    "thoughts in the first form of Magistral": Exchange(
        "<think>\nWhich?\n</think>\nRome.", (), "\nRome.", "\nWhich?\n"
    ),
    "thoughts that were cut off": Exchange("[THINK]I could [TOOL_CALLS]now", reasoning="I could [TOOL_CALLS]now"),
    "arguments that were cut off": Exchange('[TOOL_CALLS]weather[ARGS]{"city": "Ro', (MALFORMED,)),
    "a list that was cut off": Exchange('[TOOL_CALLS][{"name": "weather"', (MALFORMED,)),
    "a name alone": Exchange("[TOOL_CALLS]weather", (MALFORMED,), "weather"),
    "no JSON": Exchange("[TOOL_CALLS] not json at all", (MALFORMED,), " not json at all"),
    "arguments that are no object": Exchange("[TOOL_CALLS]weather[ARGS][1]", (MALFORMED,)),
    "an empty list": Exchange("[TOOL_CALLS][]", (MALFORMED,)),
    "a call after a broken one": Exchange(
        '[TOOL_CALLS]weather[ARGS]{city}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', (MALFORMED, ROME)
    ),
}
