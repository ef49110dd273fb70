"""Turns of GPT-OSS."""

from collections.abc import Mapping

from support.exchanges.common import MALFORMED, ROME, Exchange

HARMONY: Mapping[str, Exchange] = {
    "all channels": Exchange(
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
        "<|call|>",
        (ROME,),
        "I will look.",
        "A\nB",
    ),
    "a recipient before the channel": Exchange(
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', (ROME,)
    ),
    "an answer": Exchange("<|channel|>final<|message|>It is sunny.<|return|>", content="It is sunny."),
    "text without a channel": Exchange("42", content="42"),
    "a header that was cut off": Exchange("<|channel|>ana"),
    "a message of another role": Exchange(
        "<|channel|>final<|message|>1<|end|><|start|>user<|message|>2<|end|>", content="1"
    ),
    "thoughts that were cut off": Exchange("<|channel|>analysis<|message|>Which", reasoning="Which"),
    "invalid JSON": Exchange("<|channel|>commentary to=functions.weather<|message|>{city}", (MALFORMED,)),
    "arguments that were cut off": Exchange('<|channel|>commentary to=functions.weather<|message|>{"ci', (MALFORMED,)),
}
